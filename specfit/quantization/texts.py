"""The text that divergences are measured on: the target's own answers to the profile's prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from specfit.answering import answer_plainly
from specfit.engine import DecodeEngine
from specfit.files import append_jsonl, read_jsonl, write_jsonl
from specfit.quantization.divergence import Passages
from specfit.quantization.measured import Text
from specfit_serve.decode import Request

BATCH_SIZE = 64  # conversations answered at once
SPARE = 1.25  # prompts answered for each passage wanted: some answers end early
CERTAIN = 3.0  # standard errors by which too few answers must be long before no more are made


@dataclass(frozen=True)
class Answered:
    """A prompt, and how the target began to answer it."""

    id: str
    component: str
    prompt: list[int]
    answer: list[int]
    looped: bool = False  # it was cut where it began to repeat itself

    def is_long(self, num_counted: int) -> bool:
        """Whether it is used. A loop says little about a target."""
        return not self.looped and len(self.answer) >= num_counted


@dataclass(frozen=True)
class TextSettings:
    """How much text, and of what length."""

    weights: Mapping[str, float]  # of the components, by requests
    temperatures: Mapping[str, float]
    num_passages: int  # of each text but that of units
    num_unit_passages: int
    num_context: int  # tokens of a prompt, from its end
    num_counted: int  # tokens of an answer, from its beginning; one that is shorter is passed over
    seed: int


def read_texts(
    journal: Path,
    conversations: Sequence[dict[str, Any]],
    engine: DecodeEngine,
    settings: TextSettings,
) -> dict[Text, list[Answered]]:
    """As many conversations for each text, none in two of them, mixed as the profile is.

    Args:
        journal: keeps answers, also those that ended early; an earlier, killed run's are used.
        conversations: rows of conversations.jsonl, taken in their order.
        engine: answers them.
        settings: how many, and how long.

    Raises:
        ValueError: a component has too few conversations whose answers are long enough.
    """
    known = _read(journal)
    texts: dict[Text, list[Answered]] = {text: [] for text in Text}
    short, long = (
        _quotas(settings, num) for num in (settings.num_passages, settings.num_unit_passages)
    )
    others = [text for text in Text if text is not Text.units]
    for component, quota in short.items():
        own = [row for row in conversations if row["component"] == component]
        num_others = quota * len(others)
        num_wanted = num_others + long[component]
        found = _long_answers(journal, known, own, num_wanted, engine, settings)
        for i, answered in enumerate(found[:num_others]):
            texts[others[i % len(others)]].append(answered)
        texts[Text.units] += found[num_others:]
    return texts


def write_texts(path: Path, texts: Mapping[Text, Sequence[Answered]]) -> None:
    """A line a conversation, with the text it is in."""
    rows = [{"text": text.name} | asdict(a) for text, answered in texts.items() for a in answered]
    write_jsonl(path, rows)


def texts_of(path: Path) -> dict[Text, list[Answered]]:
    """What `write_texts` wrote."""
    texts: dict[Text, list[Answered]] = {text: [] for text in Text}
    for row in read_jsonl(path):
        texts[Text[row.pop("text")]].append(Answered(**row))
    return texts


def passages(
    answered: Sequence[Answered], settings: TextSettings, num_context: int | None = None
) -> Passages:
    """What is read of them, the shortest first, so that neighbours need little padding.

    `num_context` is that of the settings unless given.
    """
    context = settings.num_context if num_context is None else num_context
    pairs = sorted(((a.prompt, a.answer) for a in answered), key=lambda pair: len(pair[0]))
    return Passages.of(pairs, context, settings.num_counted)


def _quotas(settings: TextSettings, num_passages: int) -> dict[str, int]:
    total = sum(settings.weights.values())
    shares = {name: weight / total for name, weight in settings.weights.items()}
    return {name: max(1, round(num_passages * share)) for name, share in shares.items()}


def _long_answers(
    journal: Path,
    known: dict[str, Answered],
    conversations: Sequence[dict[str, Any]],
    num_wanted: int,
    engine: DecodeEngine,
    settings: TextSettings,
) -> list[Answered]:
    """The first conversations whose answers are long enough, answered as far as needed."""
    taken: list[Answered] = []
    found: list[Answered] = []
    while len(found) < num_wanted:
        num_left = len(conversations) - len(taken)
        if len(found) + _most_likely(len(found), len(taken), num_left) < num_wanted:
            raise _too_few(taken, found, num_wanted, conversations, settings)
        num_next = round((num_wanted - len(found)) * SPARE) + 1
        num_next = num_next if taken else min(num_next, BATCH_SIZE)  # the first tell how many do
        rows = conversations[len(taken) : len(taken) + num_next]
        _answer(journal, known, rows, engine, settings)
        taken += [known[row["id"]] for row in rows]
        found = [answered for answered in taken if answered.is_long(settings.num_counted)]
    return found[:num_wanted]


def _most_likely(num_found: int, num_taken: int, num_left: int) -> float:
    """The most long answers to expect of `num_left`, where `num_found` of `num_taken` were."""
    share = (num_found + 1) / (num_taken + 2)
    # Of the share, which was seen on some, and of what the others then happen to be.
    variance = share * (1 - share) * (num_left**2 / (num_taken + 2) + num_left)
    return min(float(num_left), num_left * share + CERTAIN * sqrt(variance))


def _too_few(
    taken: Sequence[Answered],
    found: Sequence[Answered],
    num_wanted: int,
    conversations: Sequence[dict[str, Any]],
    settings: TextSettings,
) -> ValueError:
    component = conversations[0]["component"] if conversations else "a component"
    num_looped = sum(answered.looped for answered in taken)
    return ValueError(
        "quantize.num_passages, thrice, and num_unit_passages must be at most the answers of "
        f"{settings.num_counted} tokens: {component} has {len(found)} of {num_wanted} in the first "
        f"{len(taken)} of {len(conversations)} ({len(taken) - len(found) - num_looped} ended "
        f"before, {num_looped} looped); raise data.num_train, or lower them or "
        "quantize.counted_tokens"
    )


def _answer(
    journal: Path,
    known: dict[str, Answered],
    rows: Sequence[dict[str, Any]],
    engine: DecodeEngine,
    settings: TextSettings,
) -> None:
    by_id = {row["id"]: row for row in rows if row["id"] not in known}
    if not by_id:
        return
    requests = [
        Request(i, row["prompt_ids"], settings.temperatures[row["component"]])
        for i, row in by_id.items()
    ]
    for found in answer_plainly(
        engine,
        requests,
        max_new_tokens=settings.num_counted,
        batch_size=BATCH_SIZE,
        label="quantize: text",
        seed=settings.seed,
    ):
        row = by_id[found.id]
        looped = found.finish_reason == "repetition"
        prompt = row["prompt_ids"]
        known[found.id] = Answered(found.id, row["component"], prompt, found.tokens, looped)
        append_jsonl(journal, [asdict(known[found.id])])


def _read(journal: Path) -> dict[str, Answered]:
    if not journal.exists():
        return {}
    rows = read_jsonl(journal, tolerate_truncated_tail=True)
    return {row["id"]: Answered(**row) for row in rows}
