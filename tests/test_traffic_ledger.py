"""The privacy ledger: it adds up, waits its turn, survives, and is not talked out of it."""

import json
import multiprocessing
import os
import signal
import time
from datetime import UTC, datetime, timedelta

import pytest

from specfit.traffic import ledger as module
from specfit.traffic.ledger import BudgetSpent, Ledger

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def spent(path):
    return [spend["epsilon"] for spend in json.loads(path.read_text())["spends"]]


def test_tenths_add_up_to_the_budget_exactly(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", 1.0, 30.0)
    left = [ledger.spend(0.1, "w", NOW) for _ in range(10)]
    assert left == [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]


def test_what_would_overspend_is_refused_and_not_recorded(tmp_path):
    path = tmp_path / "ledger.json"
    Ledger(path, 2.0, 30.0).spend(1.5, "w", NOW)
    with pytest.raises(BudgetSpent, match=r"fingerprint.epsilon must be at most 0.5, .* got 0.6"):
        Ledger(path, 2.0, 30.0).spend(0.6, "w", NOW)
    assert spent(path) == [1.5]


def test_refusing_early_spends_nothing(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = Ledger(path, 1.0, 30.0)
    ledger.require(1.0, NOW)
    assert not path.exists()
    ledger.spend(1.0, "w", NOW)
    with pytest.raises(BudgetSpent):
        ledger.require(0.001, NOW)


@pytest.mark.parametrize(("days", "allowed"), [(29.99, False), (30.0, True), (31.0, True)])
def test_a_spend_counts_until_its_period_is_over(tmp_path, days, allowed):
    ledger = Ledger(tmp_path / "ledger.json", 1.0, 30.0)
    ledger.spend(1.0, "w", NOW)
    later = NOW + timedelta(days=days)
    if allowed:
        assert ledger.spend(1.0, "w", later) == 0
    else:
        with pytest.raises(BudgetSpent):
            ledger.spend(1.0, "w", later)


def test_a_clock_that_was_turned_back_frees_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", 1.0, 30.0)
    ledger.spend(1.0, "w", NOW)
    with pytest.raises(BudgetSpent):
        ledger.spend(1.0, "w", NOW - timedelta(days=365))


def _spend_often(path, results):
    num = 0
    for _ in range(6):
        try:
            Ledger(path, 1.0, 30.0).spend(0.1, "w")
        except BudgetSpent:
            continue
        num += 1
    results.put(num)


def test_concurrent_processes_together_stay_within_the_budget(tmp_path):
    path = tmp_path / "ledger.json"
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_spend_often, args=(path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    total = sum(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    assert total == len(spent(path)) == 10  # of 24 that were tried


def _spend_and_hang(path):
    Ledger(path, 1.0, 30.0).spend(0.7, "w")
    time.sleep(60)


def test_a_spend_whose_process_is_killed_before_its_release_stays_spent(tmp_path):
    path = tmp_path / "ledger.json"
    process = multiprocessing.get_context("fork").Process(target=_spend_and_hang, args=(path,))
    process.start()
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=30)
    with pytest.raises(BudgetSpent, match=r"at most 0\.3"):
        Ledger(path, 1.0, 30.0).spend(0.5, "w")


def test_a_kill_while_writing_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    ledger = Ledger(path, 1.0, 30.0)
    ledger.spend(0.2, "w", NOW)
    before = path.read_bytes()

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_json", broken)
    with pytest.raises(KeyboardInterrupt):
        ledger.spend(0.2, "w", NOW)
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert ledger.spend(0.2, "w", NOW) == 0.6  # the lock was let go


def two_spends(path):
    ledger = Ledger(path, 4.0, 30.0)
    ledger.spend(1.0, "monday", NOW)
    ledger.spend(2.0, "tuesday", NOW)
    return ledger


def test_a_ledger_cut_off_anywhere_is_refused(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = two_spends(path)
    whole = path.read_bytes()
    for length in range(len(whole.rstrip())):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"ledger\.json must be"):
            ledger.spend(0.5, "w", NOW)


def _without_last(record):
    record["spends"].pop()


def _smaller(record):
    record["spends"][0]["epsilon"] = 0.1


def _earlier(record):
    record["spends"][1]["at"] = "2020-01-01T00:00:00+00:00"


def _larger_budget(record):
    record["budget"] = 400.0


def _emptied(record):
    record["spends"].clear()


def _other_kind(record):
    record["spends"] = "none"


def _without_digest(record):
    del record["digest"]


@pytest.mark.parametrize(
    "tamper",
    [_without_last, _smaller, _earlier, _larger_budget, _emptied, _other_kind, _without_digest],
)
def test_a_ledger_that_was_altered_is_refused_by_name(tmp_path, tamper):
    path = tmp_path / "ledger.json"
    ledger = two_spends(path)
    record = json.loads(path.read_text())
    tamper(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"ledger\.json must be .* got a"):
        ledger.require(0.5, NOW)


@pytest.mark.parametrize("text", ["[]", "null", '"ledger"', "", "{}"])
def test_what_is_no_ledger_is_refused_by_name(tmp_path, text):
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"ledger\.json must be a whole ledger"):
        Ledger(path, 4.0, 30.0).require(0.5, NOW)


@pytest.mark.parametrize("terms", [(8.0, 30.0), (4.0, 1.0)])
def test_a_ledger_keeps_the_terms_that_it_was_begun_with(tmp_path, terms):
    path = tmp_path / "ledger.json"
    two_spends(path)
    with pytest.raises(ValueError, match=r"fingerprint\.(budget|period_days) must be (4|30), as"):
        Ledger(path, *terms).spend(0.5, "w", NOW)
