"""The fingerprint stage keeps nothing of what it reads: canaries go in, and none comes out."""

import base64
import gzip
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from specfit.stages import fingerprint as stage
from specfit.stages.fingerprint import opened, parse, run
from specfit.traffic.config import ComponentConfig, ProfileConfig
from specfit.traffic.fingerprint_config import FingerprintConfig
from specfit.traffic.ledger import BudgetSpent

ROOT = Path(__file__).parents[1]
CANARY = 'kanarienvogel-7Ωx"q'


class ToolClassifier:
    """Requests with tools are the agent's."""

    components = ("chat", "agent")
    confusion = np.eye(2)

    def component(self, text: str, has_tools: bool) -> str:
        if "fail on this" in text:
            raise RuntimeError(text)
        if "no component" in text:
            return text
        return "agent" if has_tools else "chat"


def profile():
    return ProfileConfig(
        "two", [ComponentConfig("chat", 0.5, ["s"]), ComponentConfig("agent", 0.5, ["s"])]
    )


def exchange(text=CANARY, *, tools=True, **more):
    tool = {"type": "function", "function": {"name": CANARY, "description": CANARY}}
    return {
        "custom_id": CANARY,
        "request": {
            "model": CANARY,
            "user": CANARY,
            "metadata": {CANARY: CANARY},
            "messages": [{"role": "user", "content": text, "name": CANARY}],
            "tools": [tool] if tools else [],
        },
        "response": {
            "id": CANARY,
            "choices": [{"message": {"role": "assistant", "content": CANARY}}],
            "usage": {"prompt_tokens": 300, "completion_tokens": 40},
        },
    } | more


def lines(num=600):
    """Requests, and everything that can be wrong with one."""
    good = [exchange(tools=i % 3 == 0) for i in range(num)]
    usage = {"usage": {"prompt_tokens": CANARY}}
    wrong = [
        exchange(f"fail on this {CANARY}"),
        exchange(f"no component {CANARY}"),
        exchange(response=usage),
        exchange(response={"usage": {"completion_tokens": -1}}),
        exchange(response={"usage": {"completion_tokens": 10**400}}),
        exchange(speculation={"num_rounds": CANARY, "accepted_by_position": [1]}),
        exchange(request=CANARY),
        exchange(request={"messages": [{"role": CANARY, "content": CANARY}]}),
        exchange(request={"messages": [{"role": "user", "content": [CANARY]}]}),
        {CANARY: CANARY},
        [CANARY],
        CANARY,
    ]
    broken = [
        f'{{"request": {CANARY}'.encode(),
        CANARY.encode("utf-16"),
        b"\xff\xfe" + CANARY.encode() + b"\xff",
        b"[" * 100_000 + CANARY.encode(),
        CANARY.encode() + b" 2026-01-01 INFO Received request",
    ]
    return [json.dumps(row).encode() + b"\n" for row in good + wrong] + broken, len(wrong + broken)


def config(**more):
    return FingerprintConfig(**{"window": "today"} | more)


def fingerprinted(tmp_path, stream, seed: int | None = 0, **more):
    folder = tmp_path / "artifact"
    folder.mkdir(exist_ok=True)
    run(
        folder,
        config=config(**more),
        profile=profile(),
        classifier=ToolClassifier(),
        stream=stream,
        ledger=tmp_path / "ledger" / "ledger.json",
        generator=None if seed is None else random.Random(seed),
    )
    return json.loads((folder / "fingerprint.json").read_text())


def forms(canary=CANARY):
    """The canary as it could be written, whole or in part."""
    core = "kanarienvogel"
    raw = canary.encode()
    inner = [base64.b64encode(b"x" * i + raw).decode()[4:-6] for i in range(3)]
    return [core, core.upper(), json.dumps(canary)[1:-1], raw.hex(), raw.hex()[:26], *inner]


def leaks(text):
    return [form for form in forms() if form in text]


def test_every_form_of_the_canary_would_be_found():
    whole = CANARY.encode()
    written = [CANARY, repr(CANARY), json.dumps(CANARY), whole.hex()]
    written += [
        base64.b64encode(b"a" * i + whole + b"z" * j).decode() for i in range(3) for j in (0, 5)
    ]
    assert all(leaks(f"before {text} after") for text in written)


@pytest.mark.parametrize("num", [0, 600])
def test_no_file_and_no_log_line_holds_any_of_what_was_read(tmp_path, caplog, capfd, num):
    caplog.set_level(logging.DEBUG)
    stream, _ = lines(num)
    found = fingerprinted(tmp_path, stream, num_draft_tokens=3)
    assert found["suppressed"] is (num == 0)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"fingerprint.json", "ledger.json"}
    written = "".join(path.read_bytes().decode() + str(path) for path in files)
    assert leaks(written + caplog.text + "".join(capfd.readouterr())) == []


def test_no_error_quotes_the_stream_it_was_raised_over(tmp_path):
    # What ends a run ends it before the stream is read, or comes from the disk.
    stream, _ = lines()
    for i in range(4):
        (tmp_path / "artifact" / "fingerprint.json").unlink(missing_ok=True)
        fingerprinted(tmp_path, stream, window=f"w{i}")
    (tmp_path / "artifact" / "fingerprint.json").unlink()
    with pytest.raises(BudgetSpent) as caught:
        fingerprinted(tmp_path, stream)
    assert leaks("".join(map(str, (caught.value, caught.value.__context__)))) == []


def test_a_process_says_nothing_of_standard_input_and_releases_with_its_own_noise(tmp_path):
    script = (
        "import logging, sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, 'tests')\n"
        "import test_stages_fingerprint as t\n"
        "logging.basicConfig(level=logging.DEBUG)\n"
        "path = Path(sys.argv[1])\n"
        "with t.opened(None) as stream:\n"
        "    t.fingerprinted(path, stream, seed=None)\n"
    )
    stream, _ = lines()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((".", "kernels", "serve", "data"))}
    outputs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", script, str(tmp_path / name)]
        body = b"\n".join(line.strip(b"\n") for line in stream)
        done = subprocess.run(
            command, input=body, capture_output=True, env=environment, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:].decode()
        assert leaks((done.stdout + done.stderr).decode()) == []
        assert b"with noise" in done.stderr
        outputs.append(json.loads((tmp_path / name / "artifact/fingerprint.json").read_text()))
    assert outputs[0]["counts"] != outputs[1]["counts"]


def test_broken_lines_are_counted_and_the_rest_is_read(tmp_path):
    stream, num_broken = lines(900)
    found = fingerprinted(tmp_path, stream, epsilon=100.0, budget=100.0)
    assert (found["num_requests"], found["num_unreadable"]) == (900, num_broken)
    assert [c["weight"] for c in found["components"]] == pytest.approx([2 / 3, 1 / 3], abs=1e-3)


def test_the_spend_is_on_the_disk_before_the_noise_is_drawn(tmp_path):
    class Killed(random.Random):
        def randrange(self, *_):
            raise KeyboardInterrupt

    folder = tmp_path / "artifact"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        run(
            folder,
            config=config(),
            ledger=tmp_path / "ledger" / "ledger.json",
            profile=profile(),
            classifier=ToolClassifier(),
            stream=[],
            generator=Killed(0),
        )
    assert list(folder.iterdir()) == []
    ledger = json.loads((tmp_path / "ledger" / "ledger.json").read_text())
    assert [spend["epsilon"] for spend in ledger["spends"]] == [1.0]


def test_an_empty_ledger_is_refused_before_a_line_is_read(tmp_path):
    def unread():
        raise AssertionError("the stream was read")
        yield b""

    fingerprinted(tmp_path, [], epsilon=4.0)
    (tmp_path / "artifact" / "fingerprint.json").unlink()
    with pytest.raises(BudgetSpent, match=r"ledger\.json has left"):
        fingerprinted(tmp_path, unread())


def test_a_folder_with_its_release_is_left_as_it_is_and_costs_nothing(tmp_path):
    first = fingerprinted(tmp_path, lines()[0])
    assert fingerprinted(tmp_path, [], seed=1) == first
    assert len(json.loads((tmp_path / "ledger" / "ledger.json").read_text())["spends"]) == 1


def test_a_classifier_of_other_components_is_refused(tmp_path):
    other = ProfileConfig("other", [ComponentConfig("prose", 1.0, ["s"])])
    with pytest.raises(ValueError, match=r"profile\.components must be the classifier's"):
        run(
            tmp_path,
            config=config(),
            ledger=tmp_path / "ledger" / "ledger.json",
            profile=other,
            classifier=ToolClassifier(),
            stream=[],
        )


def test_a_file_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "none.jsonl"
    with (
        pytest.raises(FileNotFoundError, match=r"^fingerprint\.requests must be a file, no .*none"),
        opened(str(path)),
    ):
        pass


def test_lines_of_a_file_are_read(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"a\nb\n")
    with opened(str(path)) as stream:
        assert list(stream) == [b"a\n", b"b\n"]


def test_a_pipe_reads_like_a_file(tmp_path):
    path = tmp_path / "requests"
    os.mkfifo(path)
    writer = Thread(target=path.write_bytes, args=(b"a\nb\n",))
    writer.start()
    with opened(str(path)) as stream:
        assert list(stream) == [b"a\n", b"b\n"]
    writer.join()


def test_a_packed_file_reads_like_the_file(tmp_path):
    path = tmp_path / "requests.jsonl.gz"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    with opened(str(path)) as stream:
        assert list(stream) == [b"a\n", b"b\n"]


@pytest.mark.parametrize(
    "held", [gzip.compress(b"a\n" * 9)[:-9], b"a\nb\n"], ids=["cut", "not packed"]
)
def test_a_broken_packed_file_costs_nothing(tmp_path, held):
    path = tmp_path / "requests.jsonl.gz"
    path.write_bytes(held)
    with (
        pytest.raises(ValueError, match=r"requests\.jsonl\.gz is broken"),
        opened(str(path)) as stream,
    ):
        fingerprinted(tmp_path, stream)
    assert not (tmp_path / "ledger" / "ledger.json").exists()


# One line.


def parsed(**row):
    return parse(json.dumps(row).encode())


def test_a_later_turn_is_known_by_its_answers_and_what_follows_the_last():
    messages = [
        {"role": "system", "content": "s" * 10},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "t" * 50},
        {"role": "assistant", "content": "a" * 20},
        {"role": "user", "content": [{"type": "text", "text": "u" * 15}]},
    ]
    found = parsed(request={"messages": messages}, response={"usage": {"prompt_tokens": 70}})
    assert (found.turn, found.text, found.has_tools) == (3, "first", False)
    assert found.new_share == pytest.approx(15 / 100)
    assert (found.prompt_tokens, found.output_tokens, found.accepted) == (70, None, None)


@pytest.mark.parametrize(
    "row",
    [
        {"request": {"prompt": "p"}, "response": {"usage": {"completion_tokens": 9}}},
        {
            "request": {"body": {"prompt": "p"}},
            "response": {"body": {"usage": {"completion_tokens": 9}}},
        },
        {
            "request": json.dumps({"prompt": "p"}),
            "response": json.dumps({"usage": {"completion_tokens": 9}}),
        },
        {"messages": [{"role": "user", "content": "p"}], "usage": {"completion_tokens": 9}},
    ],
)
def test_requests_are_read_in_each_of_their_forms(row):
    found = parsed(**row)
    assert (found.text, found.turn, found.new_share, found.output_tokens) == ("p", 1, 1.0, 9)


def test_accepted_counts_follow_the_number_of_rounds():
    speculation = {"num_rounds": 12, "accepted_by_position": [8, 5, 1]}
    assert parsed(prompt="p", speculation=speculation).accepted == (12, 8, 5, 1)


def test_a_request_shows_no_text_when_it_is_shown():
    assert leaks(repr(parsed(prompt=CANARY))) == []


def test_nothing_of_the_stage_is_logged_but_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger=stage.log.name)
    fingerprinted(tmp_path, lines()[0])
    assert len([r for r in caplog.records if r.name == stage.log.name]) == 1
