"""Every format of logs is read for what it says, and what is broken names its line."""

import gzip
import json
import math

import pytest

from specfit.traffic.logs import read_lines, read_log
from specfit.traffic.observed import new_tokens, sessions_of, think_seconds


def words(text):
    """Stands in for a target's tokenizer."""
    return len(text.split())


def read(*rows, count=None):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return list(read_lines(lines, "log", count))


def said(role, content):
    return {"role": role, "content": content}


def exchange(messages, answer="ok", usage=(10, 5), **beside):
    """A logged request with its response."""
    return {
        "request": {"messages": messages, **beside.pop("request", {})},
        "response": {
            "created": 1_700_000_000,
            "choices": [{"message": said("assistant", answer)}],
            "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]},
        },
        **beside,
    }


# --- OpenAI's API ---


def test_usage_gives_the_lengths():
    [request] = read(exchange([said("user", "hi")], usage=(12, 7)))
    assert (request.prompt_tokens, request.output_tokens) == (12, 7)


def test_without_usage_the_tokenizer_counts():
    row = exchange([said("system", "be brief"), said("user", "a b c")], "one two")
    del row["response"]["usage"]
    [request] = read(row, count=words)
    # Roles are in what is counted, as they are in a prompt.
    assert (request.prompt_tokens, request.output_tokens) == (7, 3)


def test_without_usage_and_tokenizer_the_line_is_named():
    row = exchange([said("user", "hi")])
    del row["response"]["usage"]
    with pytest.raises(ValueError, match=r"log:2: usage\.prompt_tokens must be given"):
        read(exchange([said("user", "hi")]), row)


def test_the_first_users_message_is_the_text():
    messages = [said("system", "s"), said("user", "first"), said("user", "second")]
    assert read(exchange(messages))[0].text == "first"


def test_parts_of_a_content_are_joined_and_images_are_left_out():
    parts = [{"type": "text", "text": "see"}, {"type": "image_url"}, {"type": "text", "text": "it"}]
    assert read(exchange([said("user", parts)]))[0].text == "see\nit"


def test_tools_and_temperature_and_ids_are_read():
    tools = {"tools": [{"type": "function"}], "temperature": 0.7, "user": "u"}
    [request] = read(exchange([said("user", "hi")], request=tools, session_id=3))
    assert (request.has_tools, request.temperature) == (True, 0.7)
    assert (request.session, request.user) == ("3", "u")


@pytest.mark.parametrize(
    ("beside", "seconds"),
    [
        ({}, 1_700_000_000.0),
        ({"created": 12}, 12.0),
        ({"timestamp": 1.5, "created": 12}, 1.5),
        ({"timestamp": "1970-01-01T00:01:00Z"}, 60.0),
        ({"timestamp": "1970-01-01T00:01:00"}, 60.0),
    ],
)
def test_arrival_is_the_time_stamp_else_when_it_was_created(beside, seconds):
    assert read(exchange([said("user", "hi")], **beside))[0].arrival_seconds == seconds


@pytest.mark.parametrize("stamp", [1.7e12, "yesterday", -1, [1], math.nan, math.inf, 10**400])
def test_a_time_stamp_that_is_none_is_refused(stamp):
    with pytest.raises(ValueError, match=r"log:1: (a )?timestamp must be"):
        read(exchange([said("user", "hi")], timestamp=stamp))


def test_bare_bodies_and_batch_lines_are_requests():
    body = {"messages": [said("user", "a b")]}
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    wrapped = {"request": json.dumps(body), "response": {"body": {"usage": {"prompt_tokens": 4}}}}
    assert [r.prompt_tokens for r in read(body, batch, wrapped, count=words)] == [3, 3, 4]


@pytest.mark.parametrize("prompt", ["a b c", ["a b c"], [5, 6, 7], [[5, 6, 7]]])
def test_a_prompt_may_be_a_text_or_ids(prompt):
    assert read({"prompt": prompt}, count=words)[0].prompt_tokens == 3


@pytest.mark.parametrize("prompt", [["a", "b"], None, [], 3])
def test_several_prompts_in_one_request_are_refused(prompt):
    with pytest.raises(ValueError, match="log:1: a request must have messages or one prompt"):
        read({"prompt": prompt}, count=words)


@pytest.mark.parametrize("length", [0, -1, 1.5, "5", True])
def test_a_length_that_is_none_is_refused(length):
    with pytest.raises(ValueError, match=r"log:1: usage\.prompt_tokens must be a whole number"):
        read(exchange([said("user", "hi")], usage=(length, 5)))


# --- Mooncake and aiperf ---


def test_a_trace_is_in_milliseconds_and_tokens():
    [request] = read(
        {"timestamp": 2500, "input_length": 655, "output_length": 52, "hash_ids": [4, 7]}
    )
    assert (request.arrival_seconds, request.prompt_tokens, request.output_tokens) == (2.5, 655, 52)


def test_only_whole_blocks_of_a_trace_are_links():
    [request] = read({"input_length": 1100, "hash_ids": [1, 2, 3]})
    assert [link.end_tokens for link in request.links] == [512, 1024]


def test_equal_blocks_after_other_ones_are_other_links():
    one, other = read(*({"input_length": 1024, "hash_ids": [i, 9]} for i in (1, 2)))
    assert one.links[1].digest != other.links[1].digest


@pytest.mark.parametrize("hash_ids", [[1], list(range(70)), "12"])
def test_blocks_of_another_size_are_refused(hash_ids):
    with pytest.raises(ValueError, match="log:1: hash_ids must have one for each 512 tokens"):
        read({"input_length": 1100, "hash_ids": hash_ids})


def test_a_bailian_trace_is_refused():
    with pytest.raises(ValueError, match="log:1 must be a Mooncake trace, got one of Bailian"):
        read({"chat_id": 1, "input_length": 20, "timestamp": 3.5})


def test_a_session_of_lengths_logs_what_is_new():
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 300, "output_length": 40},
        {"session_id": "a", "delay": 2000, "input_length": 50, "output_length": 9},
    ]
    first, second = read(*rows)
    assert new_tokens(first, second) == 50
    assert think_seconds(first, second) == 2.0


def test_a_session_whose_blocks_repeat_logs_whole_prompts():
    rows = [
        {"session_id": "a", "input_length": 600, "output_length": 40, "hash_ids": [1, 2]},
        {"session_id": "a", "input_length": 700, "output_length": 9, "hash_ids": [1, 3]},
    ]
    assert new_tokens(*read(*rows)) == 60


def test_messages_of_a_trace_are_whole_unless_they_say_delta():
    def row(**more):
        return {"session_id": "a", "messages": [said("user", "a b")], "output_length": 3} | more

    assert [r.adds_only for r in read(row(), row(message_mode="delta"), count=words)] == [
        False,
        True,
    ]


# --- Files ---

V06 = (
    "INFO 10-01 18:43:27 logger.py:36] Received request cmpl-1: prompt: 'a b', params: "
    "SamplingParams(n=1), prompt_token_ids: [1, 5, 6], lora_request: None."
)
OPENAI = exchange([said("user", "hi")])
TRACE = {"timestamp": 0, "input_length": 100, "output_length": 5}


@pytest.mark.parametrize(
    ("rows", "schemas"),
    [
        ([OPENAI, TRACE], "requests of OpenAI's API .* got a Mooncake trace"),
        ([TRACE, OPENAI], "a Mooncake trace .* got requests of OpenAI's API"),
        ([OPENAI, V06], "requests of OpenAI's API .* got vLLM's log"),
        ([TRACE, V06], "a Mooncake trace .* got vLLM's log"),
        ([V06, OPENAI], "vLLM's log .* got requests of OpenAI's API"),
        ([V06, TRACE], "vLLM's log .* got a Mooncake trace"),
    ],
)
def test_mixed_schemas_name_the_line_and_both(rows, schemas):
    with pytest.raises(ValueError, match=f"log:2: mixed schemas: .*{schemas}"):
        read(*rows)


def test_broken_json_names_the_line_and_quotes_nothing():
    with pytest.raises(ValueError, match="log:3 must be JSON") as caught:
        read(TRACE, "", '{"input_length": 5, "secret')
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("line", ["{}", '{"a": 1}', "{broken", '{"request": [1]}'])
def test_what_is_no_request_is_refused(line):
    with pytest.raises(ValueError, match="log:1"):
        read(line)


@pytest.mark.parametrize("lines", [[], ["\n"], ["INFO: started"], ["[1, 2]"]])
def test_a_file_without_requests_is_refused(lines):
    with pytest.raises(ValueError, match="log must have requests"):
        read(*lines)


def test_a_packed_file_reads_like_the_file(tmp_path):
    text = "".join(json.dumps(TRACE | {"timestamp": i}) + "\n" for i in range(3))
    (tmp_path / "t.jsonl").write_text(text)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    plain = list(read_log(tmp_path / "t.jsonl"))
    assert list(read_log(tmp_path / "t.jsonl.gz")) == plain
    assert len(plain) == 3


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_broken_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"x" * 1000)[:-12])
    with pytest.raises(ValueError, match=rf"{name} is broken"):
        list(read_log(tmp_path / name))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="a log must be a file"):
        list(read_log(tmp_path / "no.jsonl"))


def test_reading_begins_before_the_file_ends():
    def lines():
        yield json.dumps(TRACE)
        yield json.dumps(TRACE)
        raise AssertionError("read too far")

    assert next(read_lines(lines(), "log")).prompt_tokens == 100


def test_neither_text_nor_ids_are_in_the_repr():
    row = exchange([said("user", "SECRET")], session_id="SECRET", user="SECRET")
    assert "SECRET" not in repr(read(row))


# --- Sessions ---


def chat(*turns, usage=(10, 5), answer="ok", **beside):
    """A request of `turns`, users and assistants in turn."""
    messages = [said(("user", "assistant")[i % 2], t) for i, t in enumerate(turns)]
    return exchange(messages, answer, usage, **beside)


def grouped(*rows):
    requests = read(*rows)
    return [[requests.index(r) for r in session] for session in sessions_of(requests)]


def test_a_request_continues_the_session_that_it_extends():
    rows = [
        chat("a", answer="b", usage=(10, 5), timestamp=0),
        chat("x", answer="y", usage=(11, 5), timestamp=1),
        chat("a", "b", "c", usage=(20, 5), timestamp=2),
        chat("x", "y", "z", usage=(21, 5), timestamp=3),
        chat("a", "b", "c", "ok", "d", usage=(30, 5), timestamp=4),
    ]
    assert grouped(*rows) == [[0, 2, 4], [1, 3]]


def test_equal_first_questions_are_told_apart_by_their_answers():
    rows = [
        chat("hello", answer="one", timestamp=0),
        chat("hello", answer="two", timestamp=1),
        chat("hello", "one", "more", usage=(20, 5), timestamp=2),
        chat("hello", "two", "more", usage=(20, 5), timestamp=3),
    ]
    assert grouped(*rows) == [[0, 2], [1, 3]]


def test_an_answer_that_the_client_changed_still_continues():
    rows = [chat("a", answer="b ", timestamp=0), chat("a", "b", "c", usage=(20, 5), timestamp=1)]
    assert grouped(*rows) == [[0, 1]]


def test_a_request_that_is_sent_again_is_a_session_of_its_own():
    assert grouped(chat("a", timestamp=0), chat("a", timestamp=1)) == [[0], [1]]


def test_users_do_not_continue_each_other():
    rows = [
        chat("a", answer="b", timestamp=0, user="u"),
        chat("a", "b", "c", usage=(20, 5), timestamp=1, user="v"),
    ]
    assert grouped(*rows) == [[0], [1]]


def test_ids_come_before_texts():
    rows = [
        chat("a", timestamp=0, session_id="s"),
        chat("q", usage=(20, 5), timestamp=1, session_id="s"),
        chat("a", "ok", "b", usage=(20, 5), timestamp=2, session_id="t"),
    ]
    assert grouped(*rows) == [[0, 1], [2]]


def test_sessions_are_in_the_order_of_arrival_not_of_the_file():
    rows = [chat("a", "ok", "b", usage=(20, 5), timestamp=9), chat("a", timestamp=3)]
    assert grouped(*rows) == [[1, 0]]


def trace(stamp, num_tokens, *hash_ids):
    return {
        "timestamp": stamp,
        "input_length": num_tokens,
        "output_length": 10,
        "hash_ids": hash_ids,
    }


def test_whole_blocks_tell_sessions():
    rows = [
        trace(0, 1100, 1, 2, 3),
        trace(1, 1200, 5, 6, 7),
        trace(2, 1500, 1, 2, 8),
        trace(3, 2100, 1, 2, 9, 10, 11),
    ]
    assert grouped(*rows) == [[0, 2, 3], [1]]


def test_a_prefix_that_sessions_share_does_not_join_them():
    # All have the block 1; what they add to it does not fill another one.
    assert grouped(*[trace(i, n, 1, 20 + i) for i, n in enumerate((900, 700, 800))]) == [
        [0],
        [1],
        [2],
    ]


def test_new_tokens_are_at_least_one():
    # A client that leaves out what was thought sends less than was read and answered.
    first, second = read(chat("a", usage=(10, 500)), chat("a", "ok", "b", usage=(30, 5)))
    assert new_tokens(first, second) == 1


def test_new_tokens_are_not_known_without_the_answer():
    row = chat("a")
    del row["response"]["usage"]["completion_tokens"]
    first, second = read(row, chat("a", "ok", "b", usage=(30, 5)))
    assert new_tokens(first, second) is None


def test_a_shared_opening_is_counted_where_it_can_be():
    system = " ".join(["word"] * 99)
    rows = [exchange([said("system", system), said("user", q * 50)], usage=(400, 5)) for q in "ab"]
    [one, _] = read(*rows, count=words)
    # The role is counted with the 99 words; the rest of the 400 is what the user says.
    assert 100 in [link.end_tokens for link in one.links]
    assert one.links[-1].end_tokens == 400
