"""Logs, fingerprints, drift and machines on paper, from the words of a command line on."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import tiny_runs
import tiny_targets

from specfit import beside, pipeline
from specfit.config import Stage
from specfit.traffic.fingerprint_config import DriftConfig
from specfit.traffic.ledger import BudgetSpent
from specfit.traffic.profile_files import to_json

NUM_REQUESTS = 60
TWO = (
    "profile.components=[{name:mine,weight:0.5,sources:[mine]},{name:b,weight:0.5,sources:[mine]}]"
)


def request(i, *, counted=True):
    usage = {"prompt_tokens": 40 + i, "completion_tokens": 10}
    return {
        "timestamp": 1000.0 + i,
        "messages": [
            {"role": "user", "content": f"Write a Python function that adds two numbers: {i}."}
        ],
    } | ({"usage": usage} if counted else {})


def write_log(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl", 40)
    return tiny_runs.overrides(folder / "root", target, data)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    return write_log(path, [request(i) for i in range(NUM_REQUESTS)])


@pytest.fixture(scope="module")
def measured(words):
    return tiny_runs.run(words, "stage=measure")


def observed(words, *more):
    return pipeline._Path(tiny_runs.composed([*words, *more])).cfg.profile


# --- Logs ---


def test_the_profile_of_a_log_is_what_the_path_is_made_for(words, log):
    logged = f"profile.from_logs={log}"
    [component] = observed(words, logged).components
    assert component.prompt_tokens.median == 40 + (NUM_REQUESTS - 1) / 2
    assert component.output_tokens.median == 10
    made = tiny_runs.run(words, "stage=profile", logged)
    record = tiny_runs.read_json(made, "profile.json")
    assert record["profile"]["components"][0]["prompt_tokens"] == asdict(component.prompt_tokens)
    assert record["logs"]["num_requests"] == NUM_REQUESTS
    assert f"{NUM_REQUESTS} requests of" in made.file("profile.md").read_text()
    plain, fitted = tiny_runs.keys(words), tiny_runs.keys(words, logged)
    assert plain["target"] == fitted["target"]
    assert all(plain[stage] != fitted[stage] for stage in ("prompts", "fit", "measure"))


def test_a_log_that_has_grown_is_read_again(words, tmp_path):
    path = write_log(tmp_path / "log.jsonl", [request(i) for i in range(NUM_REQUESTS)])
    before = observed(words, f"profile.from_logs={path}")
    write_log(path, [request(i) for i in range(2 * NUM_REQUESTS)])
    after = observed(words, f"profile.from_logs={path}")
    assert after.components[0].prompt_tokens.p90 > before.components[0].prompt_tokens.p90


def test_lengths_that_a_log_does_not_say_are_of_the_target_at_hand(words, tmp_path):
    path = write_log(
        tmp_path / "log.jsonl", [request(i, counted=False) for i in range(NUM_REQUESTS)]
    )
    # The second target's tokenizer has no merges: a token is a byte.
    other = tiny_targets.write_target(tmp_path / "target", seed=1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    logged = f"profile.from_logs={path}"
    [merged] = observed(words, logged).components
    [single] = observed(words, logged, f"target.path={other}").components
    assert single.prompt_tokens.median > 1.5 * merged.prompt_tokens.median


def test_components_are_told_apart_by_what_the_data_hold_now(words, tmp_path):
    data = tiny_targets.write_conversations(tmp_path / "data.jsonl", 30)
    own = [*words, f"data.sources.mine.path={data}", "stage=fingerprint", TWO]
    params = [_beside(own)._base()]
    tiny_targets.write_conversations(data, 35)
    params.append(_beside(own)._base())
    assert params[0] != params[1]


def _beside(words):
    return pipeline._Path(tiny_runs.composed(words)).beside


def test_a_log_with_mixed_schemas_names_the_line(words, tmp_path):
    rows = [request(0), request(1), {"timestamp": 5, "input_length": 20, "output_length": 4}]
    path = write_log(tmp_path / "log.jsonl", rows)
    with pytest.raises(ValueError, match=r"log\.jsonl:3: mixed schemas"):
        tiny_runs.run(words, "stage=profile", f"profile.from_logs={path}")


def test_a_log_that_is_not_there_or_too_short_is_refused(words, tmp_path):
    with pytest.raises(ValueError, match=r"profile\.from_logs must be a file, got .*none"):
        tiny_runs.run(words, "stage=profile", f"profile.from_logs={tmp_path}/none.jsonl")
    path = write_log(tmp_path / "log.jsonl", [request(i) for i in range(9)])
    with pytest.raises(ValueError, match=r"must have at least 50 requests, got 9"):
        tiny_runs.run(words, "stage=profile", f"profile.from_logs={path}")


def test_status_makes_nothing_of_a_log(words, log, tmp_path):
    asked = [*words, f"runtime.root={tmp_path}", f"profile.from_logs={log}"]
    with pytest.raises(ValueError, match=r"profile\.from_logs must be fitted before its status"):
        pipeline.status(tiny_runs.composed([*asked, "stage=status"]))
    assert not (tmp_path / "logs").exists()
    made = tiny_runs.run(asked, "stage=profile")
    found = pipeline.status(tiny_runs.composed([*asked, "stage=status"]))
    prompts = next(row for row in found if row.stage == "prompts")
    assert prompts.state == "made"
    assert made.manifest["inputs"]["prompts"] == prompts.key


# --- Fingerprints ---


@pytest.fixture(scope="module")
def released(words, tmp_path_factory):
    stream = tmp_path_factory.mktemp("stream") / "requests.jsonl"
    write_log(stream, [request(i) for i in range(400)])
    more = ["stage=fingerprint", "fingerprint.window=monday", f"fingerprint.requests={stream}"]
    with pytest.MonkeyPatch.context() as patch:  # noise that is the same every time
        patch.setattr("random.SystemRandom", lambda: random.Random(0))
        return more, tiny_runs.run(words, *more)


def test_a_window_is_released_once_whatever_the_stream_holds_later(words, released):
    more, artifact = released
    ledger = artifact.path.parents[1] / "fingerprint-ledger.json"
    spends = json.loads(ledger.read_text())["spends"]
    stream = Path(more[-1].partition("=")[2])
    with stream.open("a") as file:
        file.write(json.dumps(request(401)) + "\n")
    assert tiny_runs.run(words, *more).path == artifact.path
    assert json.loads(ledger.read_text())["spends"] == spends
    assert [spend["window"] for spend in spends] == ["monday"]


def test_what_the_ledger_has_not_left_is_refused(words, released):
    more, _ = released
    with pytest.raises(BudgetSpent, match=r"fingerprint\.epsilon must be at most 3, .*got 3\.5"):
        tiny_runs.run(words, *more, "fingerprint.window=tuesday", "fingerprint.epsilon=3.5")


def test_a_fingerprint_becomes_a_profile(words, released):
    _, artifact = released
    path = artifact.path / "fingerprint.json"
    [component] = observed(words, f"profile.from_fingerprint={path}").components
    # 40 to 439 tokens, evenly: nine of ten are below 400, half below 240.
    assert component.prompt_tokens.median == pytest.approx(240, rel=0.3)
    assert component.weight == 1.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["fingerprint.requests=/dev/null"], r"fingerprint\.window must say what is counted"),
        (
            ["fingerprint.window=w", "fingerprint.requests=/no/such.jsonl"],
            r"fingerprint\.requests must be a file, no /no/such",
        ),
        (["fingerprint.epsilon=0"], r"fingerprint\.epsilon must be positive, got 0"),
        (["fingerprint.epsilon=-1"], r"fingerprint\.epsilon must be positive, got -1"),
        (["fingerprint.epsilon=5"], r"fingerprint\.epsilon must be at most fingerprint\.budget"),
        (["fingerprint.min_requests=0"], r"fingerprint\.min_requests must be at least 1"),
    ],
)
def test_a_wrong_fingerprint_is_refused_and_costs_nothing(words, tmp_path, more, message):
    root = f"runtime.root={tmp_path}"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        tiny_runs.run(words, "stage=fingerprint", root, *more)
    assert not (tmp_path / "fingerprint-ledger.json").exists()


@pytest.mark.parametrize(
    ("name", "held", "message"),
    [
        ("none.json", None, r"profile\.from_fingerprint must be a file"),
        ("other.json", "{}", r"profile\.from_fingerprint must be a fingerprint\.json"),
        ("log.jsonl", "{}\n{}\n", r"log\.jsonl:2 must be JSON"),
        ("list.json", "[]", r"list\.json must hold an object"),
        (
            "few.json",
            '{"kind": "fingerprint", "suppressed": true, "min_requests": 200}',
            r"fewer than 200 requests",
        ),
    ],
)
def test_what_is_no_release_is_refused(words, tmp_path, name, held, message):
    path = tmp_path / name
    if held is not None:
        path.write_text(held)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        observed(words, f"profile.from_fingerprint={path}")


# --- Drift ---


def drift(words, *more):
    return tiny_runs.read_json(tiny_runs.run(words, "stage=drift", *more), "drift.json")


def test_drift_is_from_the_profile_that_was_fitted_to(words, log):
    found = drift(words, f"profile.from_logs={log}", f"drift.new={log}")
    [lengths] = [x for x in found["components"][0]["lengths"] if x["length"] == "prompt_tokens"]
    assert lengths["old"] == lengths["new"] is not None
    assert lengths["kolmogorov_smirnov"] == 0
    assert found["verdict"] == "keep"


def test_drift_reads_names_files_releases_and_logs(words, log, released, tmp_path):
    profile = tmp_path / "mine.json"
    profile.write_text(json.dumps(to_json(tiny_runs.composed(words).profile)))
    release = released[1].path / "fingerprint.json"
    verdicts = {
        str(new): drift(words, f"drift.new={new}")["verdict"]
        for new in (profile, release, log, "local", "chat")
    }
    assert [verdicts.pop("chat"), set(verdicts.values())] == ["refit", {"keep"}]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], r"drift\.new must be given for stage=drift"),
        (["drift.new=nobody"], r"drift\.new must be one of chat, .*, or a file, got nobody"),
        (["drift.new=/no/such.json"], r"drift\.new must be a profile's name or a file"),
        (["drift.new=local", "drift.old=nobody"], r"drift\.old must be one of chat"),
        (["drift.new=local", "drift.reuse_above=-0.5"], r"drift\.refit_above must lie between"),
    ],
)
def test_a_drift_that_cannot_be_is_refused_before_anything_is_measured(
    words, tmp_path, more, message
):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        tiny_runs.run(words, "stage=drift", f"runtime.root={tmp_path}", *more)
    assert not (tmp_path / "train").exists()


def test_drift_is_found_again_until_a_threshold_or_a_side_changes(words, log):
    def path(*more):
        return tiny_runs.run(words, "stage=drift", *more).path

    first = path(f"drift.new={log}")
    assert path(f"drift.new={log}") == first
    others = {path(f"drift.new={log}", "drift.reuse_above=-0.01"), path("drift.new=local")}
    assert first not in others
    assert len(others) == 2


def test_a_proposer_that_was_not_measured_is_named(words):
    with pytest.raises(ValueError, match=r"drift\.proposer must be one that was measured, got nix"):
        drift(words, "drift.new=local", "drift.proposer=nix")


def test_every_key_of_drift_counts(words, measured):
    made = tiny_runs.run(words, "stage=drift", "drift.new=local")
    keys = set(asdict(DriftConfig())) - {"old", "new"}
    assert set(made.manifest["params"]["drift"]) == keys
    assert made.manifest["inputs"] == {"measure": measured.key}


# --- Machines on paper ---

PAPER = ["stage=predict", "experiment=trillion", "runtime.min_free_gb=0"]


def test_a_model_on_paper_needs_no_target(tmp_path):
    more = ["target=folder", "target.path=/no/such", f"runtime.root={tmp_path}"]
    made = tiny_runs.run([*PAPER, *more])
    rows = tiny_runs.read_json(made, "latency.json")["rows"]
    factors = [row["name"] for row in rows if row["kind"] == "factor"]
    assert len(factors) == 6
    # What an experiment leaves open it has of the profile below it: nothing that shortens prompts.
    assert made.manifest["params"]["profile"]["scale"] == 1
    assert made.manifest["params"]["profile"]["max_turns"] is None
    assert all(row["limit"] for row in rows if row["kind"] == "factor" and "limit" in row)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["predict"]
    assert tiny_runs.keys([*PAPER, *more]) == {"predict": made.key}


def test_every_key_of_a_prediction_counts():
    def key(*more):
        return beside.described(tiny_runs.composed([*PAPER, *more])).key

    changes = [
        [],
        ["predict.hit_rate=0.5"],
        ["hardware.num_devices=32"],
        ["predict.model.num_layers=60"],
        ["predict.stack.concurrency=8"],
        ["profile.components.0.output_tokens.median=300"],
        ["seed=1"],
    ]
    assert len({key(*more) for more in changes}) == len(changes)
    assert key("profile.name=x", "runtime.root=x") == key()


def test_only_a_whole_description_is_on_paper():
    cfg = tiny_runs.composed(PAPER)
    assert beside.is_described(cfg)
    for stage in Stage:
        cfg.stage = stage
        assert beside.is_described(cfg) == (stage is Stage.predict)
    cfg.stage, cfg.predict.acceptance = Stage.predict, None
    assert not beside.is_described(cfg)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["hardware.num_devices=1"], r"hardware\.num_devices must hold 2050 GB of weights"),
        (["hardware=cpu"], r"hardware\.num_devices must be 1 where constants are measured"),
        (["predict.hit_rate=1.5"], r"predict\.hit_rate must lie in \[0, 1\], got 1\.5"),
        (["predict.concurrencies=[]"], r"predict\.concurrencies must be distinct numbers"),
        (["predict.model=null"], r"predict\.stack must be null without predict\.model"),
        (["predict.stack=null", "predict.rates=[0]"], r"predict\.rates must be positive"),
        (
            ["predict.acceptance=[{component:x,lengths:[1.5],source:y}]"],
            r"predict\.acceptance must name each component, got none of long_chat",
        ),
        (
            ["predict.acceptance=[{component:long_chat,lengths:[1.5],source:y}]"],
            r"predict\.stack\.factors\[2\]\.change\.num_draft_tokens must lie in \[0, 1\]",
        ),
    ],
)
def test_a_machine_that_cannot_be_is_refused(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        tiny_runs.run([*PAPER, f"runtime.root={tmp_path}", *more])
    assert not list(tmp_path.glob("predict/*/artifact.json"))
