"""What a server offers, and how much of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Limits of requests, and of the decode loop."""

    model: str  # the name that requests give
    num_draft_tokens: int
    batch_size: int  # answers in flight at once
    max_queue: int  # answers that may wait for a slot, beside those in flight
    max_new_tokens: int  # the most that a request may ask for
    max_choices: int  # the most answers that one HTTP request may ask for
    max_body_bytes: int
    drain_seconds: float  # for what is in flight when the server is told to stop
    api_key: str | None  # None: everybody is let in
