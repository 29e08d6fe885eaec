"""`specfit stage=serve` as a process: its line, its signals, and what a kill leaves."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import tiny_runs
import tiny_targets

ROOT = Path(__file__).parents[1]
COMPLETION = {"model": "tiny", "prompt": "Hi", "temperature": 0, "max_tokens": 12}
STREAM = COMPLETION | {"stream": True, "max_tokens": 170, "ignore_eos": True}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    target = tiny_targets.write_target(folder / "target")
    data = tiny_targets.write_conversations(folder / "data.jsonl")
    more = ["serve.port=0", "serve.max_length=200", "serve.served_name=tiny", "serve.batch_size=2"]
    more.append(f"hydra.run.dir={folder}/runs")
    return tiny_runs.overrides(folder / "artifacts", target, data, "stage=serve", *more)


def start(words, *more):
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "serve", "data"))
    return subprocess.Popen(
        [sys.executable, "-m", "specfit", *words, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


@contextlib.contextmanager
def serving(words, *more):
    """The process, and its address; what it logs is read, so that it never waits for that."""
    process = start(words, *more)
    process.log = []
    reader = threading.Thread(target=lambda: process.log.extend(process.stderr), daemon=True)
    reader.start()
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), "".join(process.log)
        yield process, url
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


def test_it_drains_on_sigterm_and_says_nothing_but_its_address(words):
    with serving(words) as (process, url):
        assert httpx.post(f"{url}/v1/completions", json=COMPLETION).is_success
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            until = time.monotonic() + 10
            while (health := httpx.get(f"{url}/health")).is_success:
                assert time.monotonic() < until
            assert health.status_code == 503
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0
        assert process.stdout.read() == ""
    assert any("serve drains requests=1" in line for line in process.log)
    assert not any("Traceback" in line for line in process.log)


def test_a_kill_loses_its_requests_and_nothing_else(words):
    answers = []
    for _ in range(2):
        with serving(words) as (process, url):
            answers.append(httpx.post(f"{url}/v1/completions", json=COMPLETION).json()["choices"])
            with httpx.stream("POST", f"{url}/v1/completions", json=STREAM) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGKILL)
                with pytest.raises(httpx.RemoteProtocolError):
                    list(lines)
            assert process.wait(10) == -signal.SIGKILL
    assert answers[0] == answers[1]


def test_a_port_that_is_taken_is_said_in_one_line_before_anything_is_made(words, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(words, f"serve.port={port}", f"runtime.root={tmp_path}")
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    reason = "serve.port must be free on 127.0.0.1 (Address already in use)"
    assert err.splitlines()[-1] == f"specfit: error: {reason}, got {port}"
    assert not (tmp_path / "train").exists()
