"""What flows out of this package."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """One call that the assistant made."""

    id: str | None
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One message; `content` is what is said, `reasoning` what is thought before it."""

    role: str  # one of ROLES
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # of a tool's message: the call that it answers
    reasoning: str | None = None
    learn: bool = True  # false: context only, though the assistant speaks


@dataclass(frozen=True)
class Conversation:
    """Messages, and the schemas of the tools offered in them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]  # {"type": "function", "function": {name, parameters, …}}
    id: str  # from `conversation_id`
    source: str  # its name in data.sources
    licence: str
    # What users say later, turn by turn, where a source has no answers between.
    follow_ups: tuple[tuple[Message, ...], ...] = ()


@dataclass(frozen=True)
class TokenizedConversation:
    """One conversation as the target reads it; the mask is true where the assistant speaks."""

    input_ids: Int[Tensor, " seq"]
    loss_mask: Bool[Tensor, " seq"]


def conversation_id(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    follow_ups: Sequence[Sequence[Message]] = (),
) -> str:
    """`OPENING-QUESTION`, two hashes of what the assistant is given; its answers do not count.

    OPENING is of the tools and everything up to the first user message, so that all requests of one
    session share it and `split_of` keeps them together. QUESTION is of every system, user and tool
    message, follow-ups included: two conversations with one id are duplicates. Runs of whitespace
    count as one space.
    """
    later = [message for turn in follow_ups for message in turn]
    asked = [m for m in (*messages, *later) if m.role != "assistant"]
    given = [(m.role, " ".join(m.content.split())) for m in asked]
    users = [i for i, (role, _) in enumerate(given) if role == "user"]
    opening = given[: users[0] + 1] if users else given
    return "-".join(
        hashlib.sha256(json.dumps([list(tools), said], sort_keys=True).encode()).hexdigest()[:16]
        for said in (opening, given)
    )
