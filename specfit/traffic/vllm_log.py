"""vLLM's own log, as `--enable-log-requests` (before 0.10: the default) writes it.

Forms that were seen, each a line, `INFO 10-01 18:43:27 [logger.py:36] ` or the like before it:

    Received request ID: prompt: '…', sampling params: SamplingParams(…), prompt token ids: […].
    Received request ID: prompt: '…', params: SamplingParams(…), prompt_token_ids: […], …
    Received request ID: params: SamplingParams(…), lora_request: None.
    Request ID details: prompt: '…', prompt_token_ids: […], prompt_embeds shape: None.
    Generated response ID: output: '…', output_token_ids: […], finish_reason: stop
    Generated response ID (streaming delta): output: '…', output_token_ids: […], …
    Finished request ID.

The first is of 0.2 (December 2023), the second of 0.5 to 0.10 (ids are None where a server was not
given any), the third and fourth of 0.16 (the fourth only with VLLM_LOGGING_LEVEL=DEBUG), the fifth
and sixth of 0.10 and later with `--enable-log-outputs`, the last of versions before 0.7.

What such a log does not say: lengths of answers, without `--enable-log-outputs`; tools; sessions;
the year. `--max-log-len` cuts prompts and their ids short, and leaves no mark: do not set it.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from specfit.traffic.observed import Link, Observed, chain

BLOCK_CHARS = 256  # between the links of a text; about 64 tokens

EVENT = re.compile(
    r"Received request (?P<received>\S+): "
    r"|Request (?P<detailed>\S+) details: "
    r"|Generated response (?P<generated>\S+?)(?: \(streaming (?P<stream>\w+)\))?: "
    r"|(?:Finished|Aborted) request(?:\(s\))? (?P<ended>\S+?)\.?\s*$"
)
STAMP = re.compile(r"(?:(\d{4})-)?(\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?")
LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
PROMPT = re.compile(rf"prompt: (?:None|{LITERAL})")
PROMPT_IDS = re.compile(r"prompt[_ ]token[_ ]ids: \[([\d, ]*)\]")
OUTPUT = re.compile(rf"output: {LITERAL}")
OUTPUT_IDS = re.compile(r"output_token_ids: [\[(]([\d, ]*)[\])]")
TEMPERATURE = re.compile(r"\btemperature=([\d.]+)")
# vLLM's stand-in for the text of an answer that it streamed and did not keep.
STREAMED = re.compile(r"<streaming_complete: (\d+) tokens>")


@dataclass
class _Waiting:
    """A request whose answer has not ended."""

    where: str
    arrival_seconds: float | None
    prompt: str | None = None
    prompt_ids: str | None = None  # as they stand in the log
    temperature: float | None = None
    output_tokens: int | None = None
    finished_seconds: float | None = None


def is_event(line: str) -> bool:
    """Whether a line is one of those that are read."""
    return EVENT.search(line) is not None


def requests_of(
    lines: Iterable[tuple[str, str]], count_tokens: Callable[[str], int] | None
) -> Iterator[Observed]:
    """The requests of (where, line) of each line, in the order in which they end.

    Those whose end is not in the log come last.

    Raises:
        ValueError: a prompt's length cannot be told; the message names the line.
    """
    waiting: dict[str, _Waiting] = {}
    clock = _Clock()
    for where, line in lines:
        event = EVENT.search(line)
        if event is None:
            continue
        now = clock.seconds(line[: event.start()])
        rest = line[event.end() :]
        asked = event["received"] or event["detailed"]
        if asked is not None:
            _read_request(waiting.setdefault(asked, _Waiting(where, now)), rest)
            continue
        answered = event["generated"] or event["ended"]
        request = waiting.get(answered)
        if request is None:  # it began before the log, or has several answers
            continue
        request.finished_seconds = now
        if event["generated"]:
            _read_answer(request, rest, event["stream"], count_tokens)
        if event["stream"] != "delta":
            yield _observed(waiting.pop(answered), count_tokens)
    for request in waiting.values():
        yield _observed(request, count_tokens)


def block_links(text: str, tokens: int, all_chars: int) -> tuple[Link, ...]:
    """A link at the end of every whole block of `text`, which has `tokens` over `all_chars`."""
    ends = range(BLOCK_CHARS, len(text) + 1, BLOCK_CHARS)
    return chain((text[end - BLOCK_CHARS : end], tokens * end / all_chars) for end in ends)


def _read_request(request: _Waiting, rest: str) -> None:
    prompt = PROMPT.match(rest)
    # What is not the prompt: a prompt may say anything, such as `temperature=2`.
    after = rest[prompt.end() :] if prompt else rest
    if prompt and prompt[1]:
        request.prompt = _literal(prompt[1], request.where)
    if ids := PROMPT_IDS.search(after):
        request.prompt_ids = ids[1].strip() or None
    if temperature := TEMPERATURE.search(after):
        request.temperature = float(temperature[1])


def _read_answer(
    request: _Waiting, rest: str, stream: str | None, count_tokens: Callable[[str], int] | None
) -> None:
    text = OUTPUT.match(rest)
    ids = OUTPUT_IDS.search(rest[text.end() :] if text else rest)
    if ids is not None:
        num_ids = ids[1].count(",") + 1 if ids[1].strip() else 0
        request.output_tokens = (request.output_tokens or 0) + num_ids
    elif text is not None and stream != "delta" and request.output_tokens is None:
        said = _literal(text[1], request.where)
        if streamed := STREAMED.fullmatch(said):
            request.output_tokens = int(streamed[1])
        elif count_tokens is not None:
            request.output_tokens = count_tokens(said)


def _literal(text: str, where: str) -> str:
    """What Python wrote as `text`; an error of its reader would quote it."""
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        raise ValueError(f"{where}: prompts and outputs must be Python's literals") from None


def _observed(request: _Waiting, count_tokens: Callable[[str], int] | None) -> Observed:
    where, text, ids = request.where, request.prompt, request.prompt_ids
    if text is None and ids is None:
        raise ValueError(
            f"{where}: the request's prompt must be in the log, got none; newer versions of vLLM "
            "write it with VLLM_LOGGING_LEVEL=DEBUG"
        )
    if ids is not None:
        num_tokens = ids.count(",") + 1
    elif count_tokens is not None:
        assert text is not None
        num_tokens = count_tokens(text)
    else:
        raise ValueError(
            f"{where}: prompt_token_ids must be in the log where no target's tokenizer counts, "
            "got none"
        )
    # A list of ids begins like another one exactly where the prompts do, so it serves as a text.
    said = text if text is not None else str(ids)
    return Observed(
        arrival_seconds=request.arrival_seconds,
        prompt_tokens=max(1, num_tokens),
        output_tokens=request.output_tokens,
        text=text,
        temperature=request.temperature,
        finished_seconds=request.finished_seconds,
        links=block_links(said, num_tokens, max(1, len(said))),
    )


class _Clock:
    """Seconds of time stamps that may have no year: one that goes back by months is a year on."""

    def __init__(self) -> None:
        self._year = 2000  # a leap year
        self._last: datetime | None = None

    def seconds(self, text: str) -> float | None:
        """Of the stamp in `text`, or None."""
        stamp = STAMP.search(text)
        if stamp is None:
            return None
        year, day, time, fraction = stamp.groups()
        now = self._at(year or self._year, day, time)
        if year is None and self._last is not None and (self._last - now).days > 180:
            self._year += 1
            now = self._at(self._year, day, time)
        self._last = now
        return now.timestamp() + float(fraction or 0)

    @staticmethod
    def _at(year: int | str, day: str, time: str) -> datetime:
        return datetime.fromisoformat(f"{year}-{day}T{time}").replace(tzinfo=UTC)
