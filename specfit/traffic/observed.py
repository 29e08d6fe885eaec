"""Requests as logs of any format show them, and the sessions that they make."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

LINK_BYTES = 8  # of a digest: among a billion, about one pair is equal by chance
LEAST_THINK_SECONDS = 1e-3  # a log's clock is often coarser than a quick client


class Link(NamedTuple):
    """A place in a prompt: a digest of all that stands before it, and the tokens of that."""

    digest: int
    end_tokens: int


@dataclass(frozen=True)
class Observed:
    """One request of a log and what is known of its answer.

    `text` stays in memory: nothing may write it, and with the ids it is left out of the repr.
    """

    arrival_seconds: float | None  # from any one moment
    prompt_tokens: int  # of all that is read; of what is new, where `adds_only`
    output_tokens: int | None
    text: str | None = field(default=None, repr=False)  # first user message, or the prompt
    has_tools: bool = False
    temperature: float | None = None
    session: str | None = field(default=None, repr=False)
    user: str | None = field(default=None, repr=False)  # no session has two
    finished_seconds: float | None = None  # when the answer ended
    think_seconds: float | None = None  # since the answer before, where the log itself says so
    adds_only: bool = False  # of a session whose requests are logged without what came before
    links: tuple[Link, ...] = field(default=(), repr=False)
    answered: int | None = field(default=None, repr=False)  # digest of the prompt and its answer
    component: str | None = None  # once it is told from the text, which can then go


def chain(pieces: Iterable[tuple[str, float]]) -> tuple[Link, ...]:
    """A link at the end of each piece of a prompt; with each comes the tokens up to its end."""
    links = []
    digest = 0
    for piece, end_tokens in pieces:
        digest = extend(digest, piece)
        links.append(Link(digest, round(end_tokens)))
    return tuple(links)


def extend(digest: int, piece: str) -> int:
    """The digest of what `digest` is of, followed by `piece`."""
    said = piece.encode("utf-8", "surrogatepass")  # JSON may hold half a pair
    before = digest.to_bytes(LINK_BYTES, "big")
    return int.from_bytes(blake2b(said, digest_size=LINK_BYTES, key=before).digest(), "big")


def sessions_of(requests: Sequence[Observed]) -> list[list[Observed]]:
    """Requests by session, each session and its requests in the order of their arrival.

    Requests with a session's id are that session. Another one continues the session, of the same
    user, whose last request is a prefix of it (or that request and its answer are): the longest
    there is. A link at which requests end that do not grow is shared by several sessions, such as
    a system prompt, so it tells none of them apart and is not matched; and a request that goes
    back behind a session's last one begins a session of its own.

    Sessions that began before the log, or go on after it, are as long as the log shows them.
    """
    if all(r.arrival_seconds is not None for r in requests):
        requests = sorted(requests, key=lambda r: r.arrival_seconds or 0.0)
    own = _ends_of_one_session(requests)
    sessions: list[list[Observed]] = []
    by_id: dict[tuple[str | None, str], int] = {}
    by_end: dict[tuple[str | None, int], int] = {}
    for request in requests:
        if request.session is not None:
            idx = by_id.setdefault((request.user, request.session), len(sessions))
        else:
            ends = [(request.user, link.digest) for link in reversed(request.links)]
            found = next((by_end[e] for e in ends if e in by_end and e in own), None)
            idx = len(sessions) if found is None else found
        if idx == len(sessions):
            sessions.append([])
        elif request.session is None:
            for end in _ends(sessions[idx][-1]):
                by_end.pop(end, None)
        sessions[idx].append(request)
        if request.session is None:
            by_end |= dict.fromkeys(_ends(request), idx)
    return sessions


def _ends(request: Observed) -> list[tuple[str | None, int]]:
    last = [link.digest for link in request.links[-1:]]
    answered = [] if request.answered is None else [request.answered]
    return [(request.user, digest) for digest in last + answered]


def _ends_of_one_session(requests: Sequence[Observed]) -> set[tuple[str | None, int]]:
    """Ends of requests, each of which is longer than the one before that ends there.

    Prompts may end at one link and differ: links of blocks leave out the last, broken one.
    """
    longest: dict[tuple[str | None, int], int] = {}
    shared = set()
    for request in requests:
        for end in _ends(request):
            if request.prompt_tokens <= longest.get(end, 0):
                shared.add(end)
            longest[end] = request.prompt_tokens
    return longest.keys() - shared


def new_tokens(before: Observed, now: Observed) -> int | None:
    """Tokens that a session's request adds to the context, at least 1.

    None where they cannot be told from the answer before, whose length is not known.
    """
    if now.adds_only and not _repeats(before, now):
        return max(1, now.prompt_tokens)
    if before.output_tokens is None:
        return None
    return max(1, now.prompt_tokens - before.prompt_tokens - before.output_tokens)


def _repeats(before: Observed, now: Observed) -> bool:
    """Whether `now` was logged with what came before after all: its blocks say so."""
    num = len(before.links)
    return num > 0 and tuple(islice(now.links, num)) == before.links


def think_seconds(before: Observed, now: Observed) -> float | None:
    """From an answer to the session's next request, as near as the log says.

    Where it does not say when the answer ended, the time to answer is in it, too.
    """
    if now.think_seconds is not None:
        return max(LEAST_THINK_SECONDS, now.think_seconds)
    ended = before.arrival_seconds if before.finished_seconds is None else before.finished_seconds
    if ended is None or now.arrival_seconds is None:
        return None
    return max(LEAST_THINK_SECONDS, now.arrival_seconds - ended)
