"""Requests from logs and traces: one reader a format, all of them a line at a time."""

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from specfit.traffic import observed, vllm_log
from specfit.traffic.observed import Link, Observed
from specfit.traffic.vllm_log import BLOCK_CHARS, block_links

Row = dict[str, Any]
CountTokens = Callable[[str], int] | None

TRACE_BLOCK_TOKENS = 512  # that a hash id of a Mooncake trace covers
LATEST_SECONDS = 1e11  # after the year 5000: a time stamp in milliseconds
NUM_COUNTED = 4096  # pieces of prompts whose lengths are kept


class Schema(Enum):
    """What a line of a file is; the value says it to a user."""

    openai = "requests of OpenAI's API"
    trace = "a Mooncake trace"
    vllm = "vLLM's log"


def read_log(path: Path, count_tokens: CountTokens = None) -> Iterator[Observed]:
    """The requests of a log: JSON lines or vLLM's own log, also with .gz.

    The first line says which. As JSON lines there are requests of OpenAI's API (`request` and
    `response`, batch lines with `body`, or bare bodies, and beside them `timestamp` or `created`,
    `session_id` and `user`) and traces of Mooncake and aiperf (`timestamp` in ms, `input_length`,
    `output_length`, `hash_ids`, `session_id`, `delay`).

    Args:
        path: the file.
        count_tokens: the tokens of a text to the target, for what the log gives no length of. A
            chat template's own tokens are not in the texts, and so are not counted.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is broken, of another schema, or without what is needed; the message
            names the line and quotes nothing of it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"a log must be a file, no {path}")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            yield from read_lines(lines, str(path), count_tokens)
    except (EOFError, UnicodeDecodeError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is broken: {type(error).__name__}") from error


def read_lines(
    lines: Iterable[str], where: str, count_tokens: CountTokens = None
) -> Iterator[Observed]:
    """Like `read_log`, of lines from anywhere; `where` is what messages call it."""
    count = None if count_tokens is None else lru_cache(NUM_COUNTED)(count_tokens)
    numbered = ((f"{where}:{i}", line) for i, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise ValueError(f"{where} must have requests, got an empty file")
    rows = chain([first], numbered)
    if first[1].lstrip().startswith("{"):
        yield from _json_requests(rows, count)
        return
    num_requests = 0
    for request in vllm_log.requests_of(_without_json(rows), count):
        num_requests += 1
        yield request
    if num_requests == 0:
        schemas = ", ".join(s.value for s in Schema)
        raise ValueError(f"{where} must have requests ({schemas}), got no such line")


def _json_requests(rows: Iterable[tuple[str, str]], count: CountTokens) -> Iterator[Observed]:
    schema: Schema | None = None
    for at, line in rows:
        if not line.lstrip().startswith("{") and vllm_log.is_event(line):
            raise _mixed(at, schema, Schema.vllm)
        row = _row(at, line)
        found = _schema(row, at)
        if found is not (schema or found):
            raise _mixed(at, schema, found)
        schema = found
        yield _openai(row, at, count) if schema is Schema.openai else _trace(row, at, count)


def _without_json(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for at, line in rows:
        if line.lstrip().startswith("{") and _holds_request(line):
            raise _mixed(at, Schema.vllm, _schema(_row(at, line), at))
        yield at, line


def _mixed(at: str, schema: Schema | None, found: Schema) -> ValueError:
    assert schema is not None
    return ValueError(
        f"{at}: mixed schemas: a log must be of one, {schema.value} above this line, "
        f"got {found.value}"
    )


def _holds_request(line: str) -> bool:
    """Whether a JSON line amid a log of another kind is a request."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and not row.keys().isdisjoint(REQUEST_KEYS)


REQUEST_KEYS = {"request", "body", "response", "messages", "prompt", "input_length", "text_input"}


def _schema(row: Row, at: str) -> Schema:
    if "chat_id" in row:
        # They have input_length as well, but seconds and blocks of 16 tokens.
        raise ValueError(f"{at} must be {Schema.trace.value}, got one of Bailian, which is not")
    if "input_length" in row or "text_input" in row or {"output_length", "messages"} <= row.keys():
        return Schema.trace
    if not row.keys().isdisjoint(REQUEST_KEYS):
        return Schema.openai
    raise ValueError(
        f"{at} must be of {Schema.openai.value} (request, body, messages or prompt) or of "
        f"{Schema.trace.value} (input_length, text_input or messages), got neither"
    )


def _row(at: str, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{at} must be JSON: {error.msg} at column {error.colno}") from error
    return _object(row, at, "a line")


def _object(value: object, at: str, name: str) -> Row:
    """`value`, which is an object or the JSON of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{at}: {name} must be JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{at}: {name} must be an object, got {type(value).__name__}")
    return value


def _openai(row: Row, at: str, count: CountTokens) -> Observed:
    request = _object(row.get("request") or row.get("body") or row, at, "request")
    response = _object(row.get("response") or {}, at, "response")
    response = _object(response.get("body") or response, at, "response.body")
    usage = _object(row.get("usage") or response.get("usage") or {}, at, "usage")
    stamps = (row.get("timestamp"), row.get("created"), response.get("created"))
    answer = _answer(response, at)
    output_tokens = _length(usage.get("completion_tokens"), at, "usage.completion_tokens", least=0)
    if output_tokens is None and answer is not None and count is not None:
        output_tokens = count(answer)
    return Observed(
        arrival_seconds=next((_seconds(s, at) for s in stamps if s is not None), None),
        output_tokens=output_tokens,
        temperature=_number(request.get("temperature"), at, "temperature"),
        session=_id(row.get("session_id", request.get("session_id"))),
        user=_id(row.get("user", request.get("user"))),
        **_prompt(request, usage.get("prompt_tokens"), answer, at, count),
    )


def _trace(row: Row, at: str, count: CountTokens) -> Observed:
    """A line of Mooncake's, or of aiperf's.

    aiperf (docs/reference/conversation-context-mode.md) takes what a session's later lines say as
    what is new, unless they are whole `messages`.
    """
    session = _id(row.get("session_id"))
    stamp, delay = (_number(row.get(k), at, k) for k in ("timestamp", "delay"))
    if "messages" in row or "text_input" in row:
        request = row if "messages" in row else {"prompt": row["text_input"]}
        prompt = _prompt(request, None, None, at, count)
    else:
        num_tokens = _length(row["input_length"], at, "input_length", least=1)
        if num_tokens is None:
            raise ValueError(f"{at}: input_length must be at least 1, got null")
        prompt = {
            "prompt_tokens": num_tokens,
            "links": _hashed(row.get("hash_ids") or [], num_tokens, at),
        }
    whole = "messages" in row and row.get("message_mode") != "delta"
    return Observed(
        arrival_seconds=None if stamp is None else stamp / 1000,
        output_tokens=_length(row.get("output_length"), at, "output_length", least=0),
        session=session,
        think_seconds=None if delay is None else delay / 1000,
        adds_only=session is not None and not whole,
        **prompt,
    )


def _hashed(hash_ids: object, num_tokens: int, at: str) -> tuple[Link, ...]:
    """Links at whole blocks: the last block is hashed as it is, and changes as it grows."""
    expected = -(-num_tokens // TRACE_BLOCK_TOKENS)
    if not isinstance(hash_ids, list) or (hash_ids and abs(len(hash_ids) - expected) > 1):
        got = len(hash_ids) if isinstance(hash_ids, list) else type(hash_ids).__name__
        raise ValueError(
            f"{at}: hash_ids must have one for each {TRACE_BLOCK_TOKENS} tokens of input_length "
            f"({expected}), got {got}"
        )
    whole = hash_ids[: num_tokens // TRACE_BLOCK_TOKENS]
    return observed.chain((str(h), TRACE_BLOCK_TOKENS * i) for i, h in enumerate(whole, 1))


def _prompt(request: Row, given: object, answer: str | None, at: str, count: CountTokens) -> Row:
    """What `Observed` has of a prompt, from a request's body; `given` is its length, if known."""
    num_given = _length(given, at, "usage.prompt_tokens", least=1)
    if "messages" not in request:
        return _bare_prompt(request.get("prompt"), num_given, at, count)
    messages = request["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"{at}: messages must be a list of objects")
    tools = request.get("tools") or request.get("functions")
    opening = [json.dumps(tools, sort_keys=True)] if tools else []
    users = [i for i, m in enumerate(messages) if m.get("role") == "user"]
    said = opening + [_said(m) for m in messages]
    num_opening = len(opening) + (users[0] if users else len(messages))
    num_tokens = _counted(num_given, said, at, count)
    links = _message_links(said[:num_opening], said[num_opening:], num_tokens, count)
    answered = observed.extend(links[-1].digest, answer) if answer and links else None
    return {
        "prompt_tokens": num_tokens,
        "text": _text(messages[users[0]].get("content")) if users else None,
        "has_tools": bool(tools),
        "links": links,
        "answered": answered,
    }


def _bare_prompt(prompt: object, given: int | None, at: str, count: CountTokens) -> Row:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        [prompt] = prompt
    if isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt):
        ids = ", ".join(map(str, prompt))
        return {
            "prompt_tokens": len(prompt),
            "links": block_links(ids, len(prompt), len(ids)),
        }
    if not isinstance(prompt, str):
        raise ValueError(f"{at}: a request must have messages or one prompt")
    num_tokens = _counted(given, [prompt], at, count)
    links = block_links(prompt, num_tokens, max(1, len(prompt)))
    return {"prompt_tokens": num_tokens, "text": prompt, "links": links}


def _counted(given: int | None, said: list[str], at: str, count: CountTokens) -> int:
    if given is not None:
        return given
    if count is None:
        raise ValueError(
            f"{at}: usage.prompt_tokens must be given where no target's tokenizer counts, got "
            "none; log the responses, too"
        )
    return max(1, sum(count(text) for text in said))


def _message_links(
    opening: list[str], rest: list[str], num_tokens: int, count: CountTokens
) -> tuple[Link, ...]:
    """A link at each message's end, and in what comes before the first user's also between.

    There it matters how long a prefix is that sessions share, so it is counted if that is possible.
    Elsewhere tokens are in proportion to characters.
    """
    all_chars = max(1, sum(map(len, opening)) + sum(map(len, rest)))
    pieces: list[tuple[str, float]] = []
    done = 0.0
    for text in opening:
        size = num_tokens * len(text) / all_chars if count is None else count(text)
        for start in range(0, max(1, len(text)), BLOCK_CHARS):
            block = text[start : start + BLOCK_CHARS]
            share = (start + len(block)) / max(1, len(text))
            pieces.append((block, min(num_tokens, done + size * share)))
        done = min(num_tokens, done + size)
    left = (num_tokens - done) / max(1, sum(map(len, rest)))
    ends = accumulate(map(len, rest))
    pieces += [(text, done + left * end) for text, end in zip(rest, ends, strict=True)]
    return observed.chain(pieces)


def _answer(response: Row, at: str) -> str | None:
    """What the first choice says, as `_said` has it once a later request repeats it."""
    choices = response.get("choices")
    if not choices:
        return None
    if not isinstance(choices, list):
        raise ValueError(f"{at}: response.choices must be a list")
    choice = _object(choices[0], at, "response.choices[0]")
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    return _said({"role": "assistant"} | _object(choice.get("message") or {}, at, "message"))


def _said(message: Row) -> str:
    """A message's role, text and calls."""
    parts = [str(message.get("role")), _text(message.get("content"))]
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [str(function.get("name")), str(function.get("arguments"))]
    return "\n".join(parts)


def _text(content: object) -> str:
    """The text of a content; of parts, of those that are text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [p.get("text") if isinstance(p, dict) else p for p in parts]
    return "\n".join(t for t in texts if isinstance(t, str))


def _seconds(stamp: object, at: str) -> float:
    if isinstance(stamp, str):
        try:
            moment = datetime.fromisoformat(stamp)
        except ValueError as error:
            raise ValueError(f"{at}: a timestamp must be ISO 8601 or in seconds") from error
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    number = _number(stamp, at, "timestamp")
    assert number is not None
    if number >= LATEST_SECONDS:
        raise ValueError(f"{at}: a timestamp must be in seconds, got {number:g}")
    return number


def _length(value: object, at: str, name: str, *, least: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        got = value if isinstance(value, int | float) else type(value).__name__
        raise ValueError(f"{at}: {name} must be a whole number of at least {least}, got {got}")
    return value


def _number(value: object, at: str, name: str) -> float | None:
    if value is None:
        return None
    # JSON as Python reads it has NaN and Infinity, and integers that no float holds.
    most = sys.float_info.max
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    if not number:
        got = value if isinstance(value, int | float) else type(value).__name__
        raise ValueError(f"{at}: {name} must be a finite number of at least 0, got {got}")
    assert isinstance(value, int | float)
    return float(value)


def _id(value: object) -> str | None:
    return None if value is None else str(value)
