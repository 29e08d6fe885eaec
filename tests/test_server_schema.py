"""What a request may ask for, and by which name it is told what it may not."""

import json

import pytest

from specfit_serve.server.errors import ApiError
from specfit_serve.server.schema import (
    LABELS,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    parse,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}


def parsed(**fields):
    kind = CompletionRequest if "prompt" in fields else ChatRequest
    return parse(kind, json.dumps((COMPLETION if "prompt" in fields else CHAT) | fields).encode())


REFUSED = [
    ({"foo": 1}, "foo", "unknown field foo"),
    ({"model": 7}, "model", "model must be a valid string, got 7"),
    ({"messages": []}, "messages", r"messages must .*at least 1 item"),
    ({"messages": "Hi"}, "messages", "messages must be a valid list, got 'Hi'"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "be a valid string"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "be 'system', "),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", r"messages\[0\].role must be given"),
    ({"messages": [{"role": "user", "name": "x"}]}, "messages[0].name", "unknown field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "be a text or parts of type text",
    ),
    ({"temperature": -0.1}, "temperature", "temperature must be greater than or equal to 0"),
    ({"temperature": 0.001}, "temperature", r"be 0 or lie in \[0.01, 2.0\], got 0.001"),
    ({"temperature": 2.1}, "temperature", r"be 0 or lie in \[0.01, 2.0\]"),
    ({"temperature": "hot"}, "temperature", "be a valid number, got 'hot'"),
    ({"top_p": 0}, "top_p", "be greater than 0, got 0"),
    ({"top_p": 1.01}, "top_p", "be less than or equal to 1"),
    ({"n": 0}, "n", "be greater than or equal to 1"),
    ({"n": True}, "n", "be a valid integer, got True"),
    ({"max_tokens": 0}, "max_tokens", "be greater than or equal to 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "be greater than or equal to 1"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "be max_completion_tokens"),
    ({"seed": "x"}, "seed", "be a valid integer"),
    ({"stop": [""]}, "stop[0]", "have at least 1 character"),
    ({"stop": [1]}, "stop[0]", "be a valid string"),
    ({"stop": ["a"] * 17}, "stop", "have at most 16 items"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "be greater than or equal to 0"),
    ({"stream": "yes"}, "stream", "be a valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "be absent without stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    ({"top_logprobs": 2}, "top_logprobs", "be absent without logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "be less than or equal to 20"),
    ({"tools": "x"}, "tools", "be a valid list"),
    ({"prompt": 3}, "prompt", "be a valid list"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": ["a", 1]}, "prompt[1]", "be a valid"),
    ({"prompt": [[1, "a"]]}, "prompt[0]", "be a valid"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "be less than or equal to 20"),
    ({"prompt": "a", "messages": []}, "messages", "unknown field messages"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "be 0 or absent, since the decode loop"),
    ({"presence_penalty": -1}, "presence_penalty", "be 0 or absent"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "be 1 or absent"),
    ({"logit_bias": {"5": 1}}, "logit_bias", r"be \{\} or absent"),
    ({"response_format": {"type": "json_object"}}, "response_format", "be .*text.* or absent"),
    ({"top_k": 40}, "top_k", "be 0 or -1 or absent"),
    ({"top_k": False}, "top_k", "be 0 or -1 or absent"),
    ({"min_p": 0.1}, "min_p", "be 0 or absent"),
    ({"tool_choice": "required"}, "tool_choice", 'be "auto" or "none" or absent'),
    ({"prompt": "a", "echo": True}, "echo", "be false or absent"),
    ({"prompt": "a", "suffix": "b"}, "suffix", 'be "" or absent'),
    ({"prompt": "a", "best_of": 2}, "best_of", "be 1 or absent"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_honoured_is_refused_by_name(fields, param, message):
    with pytest.raises(ApiError, match=message) as caught:
        parsed(**fields)
    assert caught.value.status == 400
    found = caught.value.param
    assert found == param or (param.startswith("prompt") and found.startswith(param))


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_asks_for_nothing_is_no_error(name):
    for value in (*NEUTRAL[name], None):
        assert parsed(**{name: value}) == parsed()


@pytest.mark.parametrize("name", LABELS)
def test_who_asks_does_not_matter(name):
    assert parsed(**{name: {"a": "b"}}) == parsed()


@pytest.mark.parametrize("name", [*ChatRequest.model_fields, *CompletionRequest.model_fields])
def test_null_is_the_default(name):
    base = {"prompt": "Hi"} if name == "prompt" else {}
    if name in ("model", "messages", "prompt"):
        with pytest.raises(ApiError, match=f"{name} must be given") as caught:
            parsed(**base | {name: None})
        assert caught.value.param == name
    else:
        assert parsed(**base | {name: None}) == parsed(**base)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"seed": ' + b"1" * 5000 + b"}",
    ],
    ids=range(8),
)
def test_a_body_that_is_no_json_is_said_to_be_none(body):
    with pytest.raises(ApiError, match="the body must be JSON") as caught:
        parse(CompletionRequest, body)
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [b"[]", b"1", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(ApiError, match="the body must be a JSON object"):
        parse(CompletionRequest, body)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[1], "b"], [[1], "b"]),
    ],
)
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_them(prompt, prompts):
    assert parsed(prompt=prompt).prompt == prompts


def test_parts_of_text_are_lines_of_one():
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    asked = parsed(messages=[{"role": "user", "content": parts}])
    assert asked.messages[0].content == "a\nb"


def test_a_stop_may_be_one_string():
    assert parsed(stop="x").stop == parsed(stop=["x"]).stop == ["x"]


def test_logprobs_are_asked_for_in_two_ways():
    assert parsed().num_logprobs is None
    assert parsed(logprobs=True).num_logprobs == 0
    assert parsed(logprobs=True, top_logprobs=3).num_logprobs == 3
    assert parsed(prompt="a", logprobs=2).num_logprobs == 2


def test_the_newer_name_of_max_tokens_means_the_same():
    assert parsed(max_completion_tokens=5).most_tokens == parsed(max_tokens=5).most_tokens == 5
    assert parsed().most_tokens is None
    assert parsed(prompt="a").most_tokens == 16
