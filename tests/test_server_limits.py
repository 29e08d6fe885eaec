"""What the server refuses, with which status and reason; and what it does when clients leave."""

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
import tiny_server
from tiny_server import MODEL, Drafts, metrics, opened, running, wait_until

from specfit.serve_config import ServeConfig
from specfit.stages.serve import open_server

COMPLETION = {"model": MODEL, "prompt": "Hi", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
LONG = COMPLETION | {"max_tokens": 100, "ignore_eos": True}
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_server.load_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def exported(target, tmp_path_factory):
    return tiny_server.export(target, tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def make(target, exported):
    def make(**config):
        return running(opened(target, exported, **{"proposer": Drafts.none} | config))

    return make


@pytest.fixture(scope="module")
def served(make):
    with make(max_new_tokens=120, max_choices=4, max_body_bytes=20_000) as found:
        yield found
    assert found.failed == []


def refused(response, status):
    """The error, after a look at its form."""
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


LIMITS = [
    ({"model": "gpt-5"}, 404, "model", "model must be tiny, got 'gpt-5'"),
    ({"prompt": [5] * 160}, 400, "prompt", "prompt must have 1 to 159 tokens, got 160"),
    ({"prompt": ""}, 400, "prompt", "prompt must have 1 to 159 tokens, got 0"),
    ({"prompt": ["Hi", [5] * 200]}, 400, "prompt", "1 to 159 tokens, got 200"),
    ({"prompt": [320]}, 400, "prompt", "prompt tokens must lie in [0, 320), got 320"),
    ({"prompt": [-1]}, 400, "prompt", "prompt tokens must lie in [0, 320), got -1"),
    ({"max_tokens": 121}, 400, "max_tokens", "max_tokens must be at most 120, got 121"),
    ({"n": 5}, 400, "n", "n must ask for at most 4 answers in all, got 5"),
    ({"n": 2, "prompt": ["a", "b", "c"]}, 400, "n", "answers in all for each of 3 prompts"),
    ({"prompt": "x" * 20_000}, 413, None, "the body must have at most 20000 bytes"),
    ({"what": 1}, 400, "what", "unknown field what"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param", "message"), LIMITS, ids=lambda x: str(x)[:30]
)
def test_what_is_beyond_a_limit_is_refused_with_it(served, fields, status, param, message, stream):
    body = COMPLETION | fields | {"stream": stream}
    error = refused(served.http.post("/v1/completions", json=body), status)
    assert error["param"] == param
    assert message in error["message"]


def test_a_conversation_that_is_too_long_names_the_limit(served):
    long = [{"role": "user", "content": "x y z " * 100}]
    error = refused(served.http.post("/v1/chat/completions", json=CHAT | {"messages": long}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "messages: the prompt must have 1 to 159 tokens, got " in error["message"]


def test_tools_that_the_template_does_not_know_are_refused(served):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    error = refused(served.http.post("/v1/chat/completions", json=CHAT | {"tools": tools}), 400)
    assert error["param"] == "tools"
    assert "tools must be absent: the target's chat template has none" in error["message"]


def test_the_newer_name_of_max_tokens_is_named_when_it_was_used(served):
    body = {**CHAT, "max_completion_tokens": 121}
    del body["max_tokens"]
    error = refused(served.http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "max_completion_tokens"


def test_what_the_template_refuses_is_said_in_its_words(target, exported, monkeypatch):
    template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('users first') }}{% endif %}"
        + target.tokenizer.chat_template
        + "{% if tools %}{{ tools }}{% endif %}"
    )
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    with running(opened(target, exported, proposer=Drafts.none)) as found:
        first = {"role": "assistant", "content": "Hi"}
        url = "/v1/chat/completions"
        error = refused(found.http.post(url, json=CHAT | {"messages": [first]}), 422)
        assert error["param"] == "messages"
        assert error["message"] == "messages: the template refuses it: users first"
        call = {"type": "function", "function": {"name": "f", "arguments": "no JSON"}}
        calling = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
        refused(found.http.post(url, json=CHAT | {"messages": calling}), 422)
        # This template knows tools: their schemas are in the prompt.
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        lengths = [
            found.http.post(url, json=CHAT | more).json()["usage"]["prompt_tokens"]
            for more in ({}, {"tools": tools})
        ]
        assert lengths[0] < lengths[1]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v2", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
def test_what_is_not_there_is_said_in_the_same_form(served, method, path, status):
    error = refused(served.http.request(method, path), status)
    assert f"{method} {path}" in error["message"]


def test_a_body_that_is_no_json_is_refused(served):
    assert (
        "must be JSON" in refused(served.http.post("/v1/completions", content=b"{"), 400)["message"]
    )


def test_a_key_is_asked_for_where_there_is_one(make):
    with make(api_key="secret") as found:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            refused(found.http.post("/v1/completions", json=COMPLETION, headers=headers), 401)
            refused(found.http.get("/v1/models", headers=headers), 401)
        headers = {"Authorization": "Bearer secret"}
        assert found.http.post("/v1/completions", json=COMPLETION, headers=headers).is_success
        assert found.http.get("/health").is_success


# --- Who waits, and who leaves ---


@contextlib.contextmanager
def streaming(http, **fields):
    """A stream whose first event has come."""
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True} | fields) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_a_full_queue_is_429_until_there_is_room(make):
    with make(batch_size=1, max_queue=1) as found:
        with httpx.Client(base_url=found.url, timeout=60) as other, streaming(found.http):
            body = COMPLETION | {"n": 2}
            response = other.post("/v1/completions", json=body)
            error = refused(response, 429)
            assert error["message"].startswith("the queue is full: 1 of 2 answers")
            assert int(response.headers["Retry-After"]) >= 1
            assert other.post("/v1/completions", json=COMPLETION).is_success
        wait_until(lambda: metrics(found.http)[RUNNING] == 0)
        assert found.http.post("/v1/completions", json=COMPLETION | {"n": 2}).is_success


@pytest.mark.parametrize("batch_size", [1, 2])
def test_who_leaves_a_stream_frees_the_slot(make, batch_size):
    with make(batch_size=batch_size) as found:
        with streaming(found.http, max_tokens=140):
            assert metrics(httpx.Client(base_url=found.url))[RUNNING] == 1
        wait_until(lambda: metrics(found.http)[RUNNING] == 0)
        seen = metrics(found.http)
        assert seen["vllm:request_success_total abort"] == 1
        assert seen["vllm:generation_tokens_total"] < 140
        assert found.http.post("/v1/completions", json=COMPLETION).is_success


def test_who_leaves_while_waiting_for_a_whole_answer_frees_the_slot(make):
    with make(batch_size=1) as found:
        with pytest.raises(httpx.ReadTimeout):
            found.http.post("/v1/completions", json=LONG | {"max_tokens": 150}, timeout=0.2)
        wait_until(lambda: metrics(found.http)[RUNNING] == 0)
        seen = metrics(found.http)
        assert seen["vllm:request_success_total abort"] == 1
        assert seen["vllm:generation_tokens_total"] < 150


def test_who_leaves_before_the_request_is_whole_is_no_error(served, caplog):
    host, port = served.url.removeprefix("http://").split(":")
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    for sent in (b"", b"POST", half):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
            time.sleep(0.1)  # until it is read
    assert served.http.post("/v1/completions", json=COMPLETION).is_success
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_who_leaves_the_queue_is_never_prefilled(make):
    with make(batch_size=1, max_queue=4) as found:
        with streaming(found.http, max_tokens=140) as lines:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{found.url}/v1/completions", json=LONG, timeout=0.1)
            watching = httpx.Client(base_url=found.url)
            wait_until(lambda: metrics(watching)[WAITING] == 0)
            assert metrics(watching)[RUNNING] == 1
            assert list(lines)[-2] == "data: [DONE]"
        assert metrics(found.http)["vllm:time_to_first_token_seconds_count"] == 1


def test_told_to_stop_it_ends_what_is_in_flight_and_refuses_the_rest(make):
    with make(batch_size=1, drain_seconds=60.0) as found:
        with streaming(found.http, max_tokens=140) as lines:
            found.server.shut_down()
            with httpx.Client(base_url=found.url) as other:
                wait_until(lambda: other.get("/health").status_code == 503)
                response = other.post("/v1/completions", json=COMPLETION)
                assert "shutting down" in refused(response, 503)["message"]
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert (
            json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        )
        found.thread.join(10)
        assert not found.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{found.url}/health")


def test_what_takes_longer_than_it_may_is_told_so(make):
    with make(batch_size=1, drain_seconds=0.0) as found:
        whole = []

        def ask():
            whole.append(httpx.post(f"{found.url}/v1/completions", json=LONG, timeout=60))

        with streaming(found.http, max_tokens=140) as lines:
            waiting = threading.Thread(target=ask)
            waiting.start()
            watching = httpx.Client(base_url=found.url)
            wait_until(lambda: metrics(watching)[WAITING] == 1)
            found.server.shut_down()
            events = [line for line in lines if line]
            waiting.join()
        assert "shutting down" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        assert "shutting down" in refused(whole[0], 503)["message"]
        found.thread.join(10)
        assert not found.thread.is_alive()
    assert found.failed == []


def test_told_twice_it_waits_for_nobody(make):
    with make(batch_size=1, drain_seconds=60.0) as found:
        with streaming(found.http, max_tokens=140) as lines:
            found.server.shut_down()
            found.server.shut_down()
            events = [line for line in lines if line]
        assert "shutting down" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        found.thread.join(10)
        assert not found.thread.is_alive()


def test_a_loop_that_fails_says_so_and_ends_the_server(target, exported):
    server = opened(target, exported, proposer=Drafts.none)

    def broken(*_args, **_kwargs):
        raise RuntimeError("out of memory")

    server._target.forward = broken
    with running(server) as found:
        error = refused(found.http.post("/v1/completions", json=COMPLETION), 500)
        assert "the decode loop has failed" in error["message"]
        found.thread.join(10)
        assert not found.thread.is_alive()
    assert [str(error) for error in found.failed] == ["out of memory"]


# --- The configuration ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"port": 65536}, r"serve\.port must lie in 0..65535, got 65536"),
        ({"batch_size": 0}, r"serve\.batch_size must be at least 1, got 0"),
        ({"max_queue": -1}, r"serve\.max_queue must be at least 0, got -1"),
        ({"max_length": 1}, r"serve\.max_length must be at least 2, or null, got 1"),
        ({"drain_seconds": -1.0}, r"serve\.drain_seconds must be at least 0, got -1"),
        ({"api_key": ""}, r"serve\.api_key must not be empty; null is none, got ''"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        ServeConfig(**config)


def test_a_length_beyond_the_context_is_refused(target, exported):
    with pytest.raises(ValueError, match=r"serve\.max_length must be at most 252: the target's"):
        opened(target, exported, max_length=257)


def test_memory_limits_the_length_where_nobody_else_does(target, exported, monkeypatch):
    # Six layers and the head's, two heads of 16, keys and values, float32.
    column_bytes = 2 * 7 * 2 * 16 * 4
    for num_columns, expected in ((100, 100), (10_000, 256)):
        free = 2 * num_columns * column_bytes * 3
        monkeypatch.setattr("specfit.stages.serve._free_bytes", lambda _, free=free: free)
        server = opened(target, exported, max_length=None, batch_size=3)
        assert server._target.max_length == expected
        assert server._settings.num_draft_tokens == 4
    monkeypatch.setattr("specfit.stages.serve._free_bytes", lambda _: 10)
    with pytest.raises(ValueError, match=r"serve\.batch_size must leave memory for 6 columns"):
        opened(target, exported, max_length=None)


@pytest.mark.parametrize("drafts", Drafts)
def test_every_proposer_gives_the_same_greedy_answers(target, exported, drafts):
    with running(opened(target, exported, proposer=drafts)) as found:
        choices = found.http.post(
            "/v1/completions",
            json=COMPLETION | {"prompt": ["a b a b a", "x"], "temperature": 0, "max_tokens": 20},
        ).json()["choices"]
        drafted = metrics(found.http)["vllm:spec_decode_num_drafts_total"]
    with running(opened(target, exported, proposer=Drafts.none)) as plain:
        expected = plain.http.post(
            "/v1/completions",
            json=COMPLETION | {"prompt": ["a b a b a", "x"], "temperature": 0, "max_tokens": 20},
        ).json()["choices"]
    assert [c["text"] for c in choices] == [c["text"] for c in expected]
    assert (drafted > 0) == (drafts is not Drafts.none)


def test_without_a_name_it_is_the_targets(target, exported):
    server = open_server(ServeConfig(max_length=64), tiny_server.DecodeEngine(target), exported)
    assert server._settings.model == target.info.name
