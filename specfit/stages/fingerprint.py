"""`fingerprint`: what may be known of the traffic without keeping any of it."""

import gzip
import json
import logging
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from specfit.checks import require
from specfit.files import write_json
from specfit.traffic.config import ProfileConfig
from specfit.traffic.fingerprint import Counts, Request, record, release
from specfit.traffic.fingerprint_config import FingerprintConfig
from specfit.traffic.ledger import Ledger
from specfit.traffic.simplex import Values, check_confusion

VERSION = 1
FIGURES = "fingerprint.json"
MOST = 1 << 53  # counts beyond are no counts, and no float holds them
log = logging.getLogger(__name__)


@runtime_checkable
class Classifier(Protocol):
    """Says which component of the profile a request is of."""

    @property
    def components(self) -> Sequence[str]: ...

    @property
    def confusion(self) -> Values:
        """On public data: P(predicted j | true i) at [i, j]."""

    def component(self, text: str, has_tools: bool) -> str: ...


@contextmanager
def opened(requests: str | None) -> Iterator[Iterable[bytes]]:
    """The lines of a file or pipe, also with .gz, or of standard input for None and `-`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: what was packed is broken; nothing was spent.
    """
    if requests in (None, "-"):
        yield sys.stdin.buffer
        return
    path = Path(str(requests)).expanduser()
    if not path.exists() or path.is_dir():
        raise FileNotFoundError(f"fingerprint.requests must be a file, no {path}")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is broken: {type(error).__name__}") from error


def run(
    folder: Path,
    *,
    config: FingerprintConfig,
    profile: ProfileConfig,
    classifier: Classifier,
    stream: Iterable[bytes],
    ledger: Path,
    generator: random.Random | None = None,
) -> None:
    """Writes fingerprint.json: counts with noise, and the mix and lengths that they say.

    Of the stream nothing is kept but counts, and nothing is logged before they have their noise: no
    text, no id, no number of lines, so there is no progress bar. The spend is in the ledger before
    the noise is drawn. A folder that has its fingerprint.json already is left as it is.

    Args:
        folder: of the artifact.
        config: the budget, and what is counted.
        profile: its components are counted, less their shared prefixes.
        classifier: of the same components.
        stream: the requests, JSON a line; see `parse`.
        ledger: where spends are kept.
        generator: of the noise, for tests: by default the operating system's random bits.

    Raises:
        BudgetSpent: the ledger has less left than a release costs; said before anything is read.
        ValueError: the classifier is of other components or cannot be undone, or the ledger is
            broken.
    """
    if (folder / FIGURES).exists():
        return
    require(
        config.window is not None,
        "fingerprint.window",
        "say what is counted (2026-12-01, say): a window is released once",
        config.window,
    )
    window = str(config.window)
    generator = generator or random.SystemRandom()
    counts = Counts(profile, config.num_draft_tokens)
    confusion = _confusion(classifier, counts.components)
    budget = Ledger(ledger, config.budget, config.period_days)
    budget.require(config.epsilon)
    for line in stream:
        count(line, counts, classifier, generator)
    left = budget.spend(config.epsilon, window)
    found = release(counts, config.epsilon, generator)
    figures = record(found, confusion, min_requests=config.min_requests, window=window)
    write_json(folder / FIGURES, figures)
    log.info(
        "fingerprint: %s requests, %s unreadable (with noise), epsilon %g spent, %g left",
        figures.get("num_requests", f"suppressed, fewer than {config.min_requests}"),
        *(figures.get("num_unreadable", "?"), config.epsilon, left),
    )


def _confusion(classifier: Classifier, components: list[str]) -> Values:
    """Of the classifier, in the order of `components`."""
    if set(classifier.components) != set(components):
        raise ValueError(
            f"profile.components must be the classifier's ({', '.join(classifier.components)}), "
            f"got {', '.join(components)}"
        )
    order = [list(classifier.components).index(name) for name in components]
    confusion: Values = np.asarray(classifier.confusion, np.float64)[order][:, order]
    check_confusion(confusion, components)
    return confusion


def count(line: bytes, counts: Counts, classifier: Classifier, generator: random.Random) -> None:
    """Counts one line, which may be anything.

    Whatever goes wrong with it is counted as unreadable, and dropped: the message of an error may
    quote the line, and a run that ends would tell that the line was there.
    """
    try:
        request = parse(line)
        component = classifier.component(request.text, request.has_tools)
        known = component in counts.components
    except Exception:  # noqa: BLE001
        known = False
    if known:
        counts.add(request, component, generator)
    else:
        counts.add_unreadable()


def parse(line: bytes) -> Request:
    """A request of an OpenAI-style log.

    `{"request": {…}, "response": {…}}`, each perhaps in a `body`, or the request alone with `usage`
    beside its fields. Tokens are those of `usage`; the turn is one more than the answers among the
    messages, so a session's id is not needed; what is new is what follows the last of them, by its
    share of the characters. `speculation`, if there, is `{"num_rounds": …,
    "accepted_by_position": […]}`.

    Raises:
        Exception: of any kind, if it is not that; its message may quote the line.
    """
    row = json.loads(line)
    request = _body(row.get("request", row))
    response = _body(row.get("response") or {})
    usage = response.get("usage") or row.get("usage") or {}
    tools = request.get("tools") or []
    messages = request.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": request["prompt"]}]
    texts = [_text(message.get("content")) for message in messages]
    roles = [message["role"] for message in messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    size = sum(map(len, texts)) + (len(json.dumps(tools)) if tools else 0)
    new = sum(map(len, texts[answers[-1] + 1 :])) if answers else size
    return Request(
        text=texts[roles.index("user")],
        has_tools=bool(tools),
        turn=len(answers) + 1,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        new_share=new / size if size else 1.0,
        output_tokens=_count(usage.get("completion_tokens")),
        accepted=_accepted(row.get("speculation")),
    )


def _body(value: Any) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(value) if isinstance(value, str) else value
    return row.get("body") or row


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.get("text", "") for part in content)


def _count(value: Any) -> int | None:
    return None if value is None else _counts([value])[0]


def _counts(values: list[Any]) -> tuple[int, ...]:
    if not all(isinstance(value, int) and 0 <= value < MOST for value in values):
        raise ValueError
    return tuple(values)


def _accepted(speculation: Any) -> tuple[int, ...] | None:
    if speculation is None:
        return None
    return _counts([speculation["num_rounds"], *speculation["accepted_by_position"]])
