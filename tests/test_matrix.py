"""Heads by profiles, from rounds that were written by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from tiny_runs import composed

from specfit.artifacts import Artifact
from specfit.matrix import Found, Job, jobs_of, matrix, measured_heads
from specfit.report import matrix as page


def request(name, proposer, kept, component="c", k=2):
    """An answer with a round for each of `kept`."""
    rounds, start = [], 1
    for num in kept:
        rounds.append([start, k, num])
        start += num + 1
    return {
        "id": name,
        "component": component,
        "proposer": proposer,
        "temperature": 0.0,
        "num_draft_tokens": 0 if proposer == "none" else k,
        "num_prompt_tokens": 10,
        "tokens": [0] * start,
        "finish_reason": "length",
        "loop_start": None,
        "rounds": rounds,
        "turn": 0,
    }


def found(tmp_path, profile, seed, rows, weights=None):
    path = tmp_path / f"{profile}{seed}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Found(profile, seed, weights or {"c": 1.0}, path)


def measured(tmp_path, profile, other, seed, own_kept, other_kept):
    """Eight prompts: `own_kept` of the profile's head, `other_kept` of the other's."""
    rows = []
    for i in range(8):
        rows.append(request(f"{profile}{seed}-{i}", "none", [0, 0]))
        rows.append(request(f"{profile}{seed}-{i}", "eagle3", own_kept))
        rows.append(request(f"{profile}{seed}-{i}", other, other_kept))
    return found(tmp_path, profile, seed, rows)


def test_lengths_are_tokens_over_rounds_and_changes_are_from_the_profile_s_own_head(tmp_path):
    rows = matrix(
        [
            measured(tmp_path, "code", "chat", 0, [2, 1], [0, 0]),
            measured(tmp_path, "chat", "code", 0, [1, 1], [1, 0]),
        ]
    )
    at = {(row["head"], row["profile"]): row for row in rows}
    assert at["code", "code"]["acceptance_length"] == 2.5
    assert at["chat", "code"]["acceptance_length"] == 1.0
    assert at["chat", "code"]["change"] == pytest.approx(1 / 2.5 - 1)
    assert at["code", "chat"]["change"] == pytest.approx(1.5 / 2 - 1)
    assert at["code", "code"]["change"] == 0
    # All prompts are alike: no resample is another.
    assert at["chat", "code"]["change_low"] == at["chat", "code"]["change_high"]


def test_seeds_are_drawn_too_so_that_what_training_changes_is_in_the_interval(tmp_path):
    rows = matrix(
        [
            measured(tmp_path, "code", "chat", 0, [2, 2], [2, 2]),
            measured(tmp_path, "code", "chat", 1, [2, 2], [0, 0]),
        ]
    )
    row = next(row for row in rows if row["head"] == "chat")
    assert row["by_seed"] == [3.0, 1.0]
    assert (row["num_seeds"], row["num_sessions"]) == (2, 16)
    # Sixteen tokens-over-rounds of two seeds: both the first, both the second, or one of each.
    assert row["acceptance_length_low"] == 1.0
    assert row["acceptance_length_high"] == 3.0
    assert row["change_high"] == 0


def test_both_heads_of_a_change_are_drawn_on_the_same_prompts(tmp_path):
    # Prompts differ widely, and both heads alike: their ratio does not vary.
    rows = []
    for i, kept in enumerate(([2, 2, 2], [0, 0, 0], [1], [2, 0])):
        rows += [request(str(i), "eagle3", kept), request(str(i), "chat", kept)]
    [own, other] = matrix([found(tmp_path, "code", 0, rows)])
    assert own["acceptance_length_high"] - own["acceptance_length_low"] > 0.5
    assert (other["change_low"], other["change_high"]) == (0, 0)


def test_components_count_by_their_share_of_the_requests(tmp_path):
    rows = [request("a", "eagle3", [2]), request("b", "eagle3", [2])]
    rows.append(request("c", "eagle3", [0], "d"))
    [row] = matrix([found(tmp_path, "mix", 0, rows, {"c": 0.5, "d": 0.5})])
    assert row["acceptance_length"] == (3 + 1) / 2


def test_of_several_k_and_temperatures_the_first_counts_and_is_said(tmp_path):
    rows = [request("a", "eagle3", [2]), request("a", "eagle3", [0]) | {"temperature": 1.0}]
    rows.append(request("a", "eagle3", [0], k=4))
    [row] = matrix([found(tmp_path, "code", 0, rows)])
    assert (row["acceptance_length"], row["num_sessions"]) == (3, 1)
    assert (row["num_draft_tokens"], row["temperatures"]) == (2, [0.0])


def test_a_head_that_a_seed_lacks_is_left_out(tmp_path):
    first = measured(tmp_path, "code", "chat", 0, [2], [1])
    second = found(tmp_path, "code", 1, [request("x", "eagle3", [1])])
    assert {row["head"] for row in matrix([first, second])} == {"code"}


def test_heads_are_measured_on_the_profiles_of_their_own_seed(tmp_path, monkeypatch):
    requests = tmp_path / "requests.jsonl"
    cfgs = [composed((f"profile={p}", f"seed={s}")) for p in ("coding", "tools") for s in (0, 1)]
    jobs = [Job(cfg.profile.name, cfg.seed, cfg) for cfg in cfgs]
    monkeypatch.setattr("specfit.matrix.jobs_of", lambda _sweep: jobs)
    asked = []

    def path_of(cfg):
        head = Artifact("train", "key", Path(f"{cfg.profile.name}{cfg.seed}"))
        asked.append((cfg.profile.name, cfg.seed, cfg.measure.speculators))
        # A path's weights may be fitted to logs: they are not those of its configuration.
        return SimpleNamespace(
            train=head,
            measure=SimpleNamespace(file=lambda _name: requests),
            weights={cfg.profile.name: 0.25},
        )

    made = measured_heads("sweep", path_of)
    assert [(m.profile, m.seed, m.weights) for m in made] == [
        ("coding", 0, {"coding": 0.25}),
        ("coding", 1, {"coding": 0.25}),
        ("tools", 0, {"tools": 0.25}),
        ("tools", 1, {"tools": 0.25}),
    ]
    # First the heads, then each profile with the other one's head of its own seed.
    assert [heads for _, _, heads in asked[4:]] == [
        {"tools": "tools0"},
        {"tools": "tools1"},
        {"coding": "coding0"},
        {"coding": "coding1"},
    ]


def test_a_sweep_s_jobs_are_read_from_what_hydra_wrote(tmp_path):
    for i, name in enumerate(("coding", "tools")):
        folder = tmp_path / str(i)
        (folder / ".hydra").mkdir(parents=True)
        (folder / "job.json").write_text("{}")
        cfg = OmegaConf.structured(composed((f"profile={name}", "seed=7")))
        (folder / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    jobs = jobs_of(tmp_path)
    assert [(job.profile, job.seed) for job in jobs] == [("coding", 7), ("tools", 7)]
    assert jobs[0].cfg == composed(("profile=coding", "seed=7"))
    (tmp_path / "1" / ".hydra" / "config.yaml").write_text(
        (tmp_path / "0" / ".hydra" / "config.yaml").read_text()
    )
    with pytest.raises(ValueError, match="several of profile coding and seed 7"):
        jobs_of(tmp_path)


def test_a_folder_without_jobs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"report\.matrix must be a multirun folder"):
        jobs_of(tmp_path)


def test_the_page_says_which_heads_are_apart(tmp_path):
    rows = matrix(
        [
            measured(tmp_path, "code", "chat", 0, [2, 1], [0, 0]),
            measured(tmp_path, "chat", "code", 0, [1, 1], [1, 1]),
        ]
    )
    page.write(tmp_path, rows, 0.95)
    text = (tmp_path / "matrix.md").read_text()
    assert "at k = 2 and temperature 0, 1 seeds together" in text
    assert "On code its own head's acceptance length is longer than chat." in text
    assert "On chat its own head's acceptance length is not told apart from code." in text
    assert "The largest loss off the diagonal: chat on code, -60.0" in text
    assert (tmp_path / "matrix.png").stat().st_size > 1000
    assert json.loads((tmp_path / "matrix.json").read_text())["rows"] == rows
