"""vLLM's own log is read in the forms that its versions write."""

import pytest

from specfit.traffic.logs import read_lines


def read(*lines):
    """The requests; a text has a token a word."""
    return list(read_lines(lines, "log", lambda text: len(text.split())))


PARAMS = "SamplingParams(n=1, presence_penalty=0.0, temperature=0.7, top_p=0.95, max_tokens=100)"
V02 = (
    "INFO 12-19 14:27:21 async_llm_engine.py:379] Received request cmpl-1: prompt: 'a b', sampling "
    f"params: {PARAMS}, prompt token ids: [1, 5, 6]."
)
V06 = (
    "INFO 10-01 18:43:27 logger.py:36] Received request cmpl-1: prompt: 'a b', params: "
    f"{PARAMS}, prompt_token_ids: [1, 5, 6], lora_request: None, prompt_adapter_request: None."
)
V08 = (
    "(APIServer pid=7) INFO 04-10 03:44:50 [logger.py:39] Received request cmpl-1: "
    'prompt: "a\'s b", '
    f"params: {PARAMS}, prompt_token_ids: None, lora_request: None, prompt_adapter_request: None."
)
V16 = [
    "(APIServer pid=7) DEBUG 02-13 11:33:33 [logger.py:37] Request cmpl-1 details: "
    "prompt: 'a b', "
    "prompt_token_ids: [1, 5, 6], prompt_embeds shape: None.",
    "(APIServer pid=7) INFO 02-13 11:33:33 [logger.py:49] Received request cmpl-1: "
    f"params: {PARAMS}, lora_request: None.",
]


@pytest.mark.parametrize(("lines", "num_tokens"), [([V02], 3), ([V06], 3), ([V08], 2), (V16, 3)])
def test_requests_of_every_version_are_read(lines, num_tokens):
    [request] = read("INFO 01-01 00:00:00 api_server.py:1] started", *lines)
    assert (request.prompt_tokens, request.output_tokens) == (num_tokens, None)
    assert request.temperature == 0.7
    assert request.text in ("a b", "a's b")


def test_what_a_prompt_says_is_not_taken_for_the_log():
    prompt = "x prompt_token_ids: [1, 2], temperature=2.0 Finished request cmpl-1."
    line = V06.replace("'a b'", repr(prompt))
    [request] = read(line)
    assert (request.prompt_tokens, request.temperature, request.text) == (3, 0.7, prompt)


GENERATED = "INFO 10-01 18:43:29 [logger.py:71] Generated response cmpl-1"


@pytest.mark.parametrize(
    ("lines", "num_tokens"),
    [
        ([f"{GENERATED}: output: 'x, y', output_token_ids: [4, 5, 6], finish_reason: stop"], 3),
        ([f"{GENERATED}: output: '', output_token_ids: [], finish_reason: stop"], 0),
        (
            [
                f"{GENERATED} (streaming delta): output: 'x', output_token_ids: [4, 5], "
                "finish_reason: None"
            ]
            * 2
            + [
                f"{GENERATED} (streaming complete): output: 'xx', output_token_ids: None, "
                "finish_reason: streaming_complete"
            ],
            4,
        ),
        (
            [
                f"{GENERATED} (streaming complete): output: '<streaming_complete: 58 tokens>', "
                "output_token_ids: None, finish_reason: streaming_complete"
            ],
            58,
        ),
        ([f"{GENERATED}: output: 'x y', finish_reason: stop"], 2),
        (["INFO 10-01 18:43:29 async_llm_engine.py:173] Finished request cmpl-1."], None),
    ],
)
def test_answers_are_as_long_as_the_log_says(lines, num_tokens):
    [request] = read(V06, *lines)
    assert request.output_tokens == num_tokens
    assert request.finished_seconds - request.arrival_seconds == 2.0


def test_a_new_year_is_after_the_old_one():
    old = V06.replace("10-01 18:43:27", "12-31 23:59:59").replace("cmpl-1", "cmpl-0")
    new = V06.replace("10-01 18:43:27", "01-01 00:00:01")
    before, after = read(old, new)
    assert after.arrival_seconds - before.arrival_seconds == 2.0


def test_a_prompt_that_is_not_in_the_log_is_refused():
    with pytest.raises(ValueError, match=r"log:1: .* VLLM_LOGGING_LEVEL=DEBUG"):
        read(V16[1])


def test_a_prompt_without_ids_needs_a_tokenizer():
    with pytest.raises(ValueError, match="log:1: prompt_token_ids must be in the log"):
        list(read_lines([V08], "log"))


@pytest.mark.parametrize("line", [V06, f"{V06}\n{GENERATED}: output: 'a b', finish_reason: stop"])
def test_a_broken_literal_names_the_line_and_quotes_nothing(line):
    lines = line.split("\n")
    lines[-1] = lines[-1].replace("'a b'", r"'secret \x'")
    with pytest.raises(ValueError, match="log:1: prompts and outputs must be") as caught:
        read(*lines)
    assert "secret" not in str(caught.value)
