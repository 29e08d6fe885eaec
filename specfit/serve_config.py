"""The configuration of `serve`."""

from dataclasses import dataclass
from enum import Enum

from specfit.checks import require, require_positive


class Drafts(Enum):
    """What drafts: the exported head, a lookup in the sequence itself, or nothing."""

    eagle3 = 1
    ngram = 2
    none = 3


@dataclass
class ServeConfig:
    """The decode loop behind an OpenAI-compatible HTTP server, until it is told to stop."""

    host: str = "127.0.0.1"  # 0.0.0.0: reachable from other machines
    port: int = 8000  # 0: any that is free
    batch_size: int = 8  # answers in flight at once
    max_length: int | None = None  # tokens of a prompt and its answer; null: as memory allows
    num_draft_tokens: int = 4
    proposer: Drafts = Drafts.eagle3
    max_queue: int = 64  # answers that may wait for a slot; beyond, 429
    max_new_tokens: int = 1024  # the most that a request may ask for
    max_choices: int = 16  # answers to one HTTP request: n times its prompts
    max_body_bytes: int = 4 << 20
    drain_seconds: float = 30.0  # for what is in flight when told to stop (SIGTERM, SIGINT)
    served_name: str | None = None  # what requests call the model; null: the target's name
    # What clients must send; null: nothing. `serve.api_key='${oc.env:NAME}'` keeps it out of runs/.
    api_key: str | None = None

    def __post_init__(self) -> None:
        require(0 <= self.port < 1 << 16, "serve.port", "lie in 0..65535", self.port)
        counts = ("batch_size", "num_draft_tokens", "max_new_tokens", "max_choices")
        require_positive(self, "serve", *counts, "max_body_bytes")
        require(self.max_queue >= 0, "serve.max_queue", "be at least 0", self.max_queue)
        require(bool(self.host), "serve.host", "be an address; 0.0.0.0 is all", "''")
        require(self.drain_seconds >= 0, "serve.drain_seconds", "be at least 0", self.drain_seconds)
        long = self.max_length is None or self.max_length >= 2
        require(long, "serve.max_length", "be at least 2, or null", self.max_length)
        for name in ("served_name", "api_key"):
            require(getattr(self, name) != "", f"serve.{name}", "not be empty; null is none", "''")
