"""Sessions: requests that follow each other, whose answers are not known before they are made."""

import importlib.resources
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specfit_data.conversations import Conversation, Message

SENTENCE_END = re.compile(r"(?<=[.:!?])(?=\s)|(?=\n)")


@dataclass(frozen=True)
class Session:
    """A first request, and what is added to it before each later answer."""

    first: Conversation  # up to its first answer, if it has one; the id is of the whole
    follow_ups: tuple[tuple[Message, ...], ...] = ()  # user messages, or results of tools
    num_composed: int = 0  # conversations whose questions were added to the first one's

    @property
    def request(self) -> tuple[Message, ...]:
        """The first request, without the answer that the source has for it."""
        messages = self.first.messages
        return messages[:-1] if messages[-1].role == "assistant" else messages

    def shortened(self, num_turns: int) -> "Session":
        """The first `num_turns` requests, at least one; all where there are fewer."""
        return replace(self, follow_ups=self.follow_ups[: num_turns - 1])


def session_of(conversation: Conversation) -> Session:
    """The requests of a conversation: the first is answered after its first user turn.

    Later answers are left out: a later request answers what the target itself said. Results of
    tools stay, though the target may have called none.
    """
    messages = conversation.messages
    first_user = next((i for i, m in enumerate(messages) if m.role == "user"), len(messages))
    later = range(first_user, len(messages))
    answer = next((i for i in later if messages[i].role == "assistant"), len(messages))
    added: list[list[Message]] = [[]]
    for message in messages[answer + 1 :]:
        if message.role == "assistant":
            added.append([])
        else:
            added[-1].append(message)
    own = tuple(tuple(turn) for turn in added if turn)
    first = replace(conversation, messages=messages[: answer + 1], follow_ups=())
    return Session(first, own + conversation.follow_ups)


def compose(session: Session, others: Sequence[Conversation]) -> Session:
    """`session`, and then the first user turns of other conversations, one a turn.

    All of its requests offer the tools of all of them; of tools of one name, the first. System
    messages and later turns of `others` are left out.
    """
    tools = {tool["function"]["name"]: tool for tool in session.first.tools}
    follow_ups = list(session.follow_ups)
    for other in others:
        for tool in other.tools:
            tools.setdefault(tool["function"]["name"], tool)
        asked = session_of(other).request
        follow_ups.append(tuple(message for message in asked if message.role == "user"))
    return Session(
        replace(session.first, tools=tuple(tools.values())),
        tuple(follow_ups),
        session.num_composed + len(others),
    )


def with_prefix(session: Session, text: str) -> Session:
    """`session` with `text` before its own system message, in one system message with it."""
    messages = session.first.messages
    has_own = messages[0].role == "system"
    own = messages[0].content if has_own else ""
    system = Message("system", f"{text}\n\n{own}" if own else text)
    rest = messages[1:] if has_own else messages
    return replace(session, first=replace(session.first, messages=(system, *rest)))


def prefix_text(num_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The beginning of a coding agent's system prompt, of about `num_tokens` tokens.

    It ends where a sentence or a line does: of these ends, the one that comes closest. Where more
    tokens are asked for than there are, it is the whole prompt.
    """
    path = importlib.resources.files("specfit_data") / "samples" / "system_prompt.txt"
    text = path.read_text(encoding="utf-8").strip()
    ends = [match.start() for match in SENTENCE_END.finditer(text)] + [len(text)]
    beginnings = [text[:end] for end in ends if text[:end].strip()]
    return min(beginnings, key=lambda beginning: abs(count_tokens(beginning) - num_tokens))
