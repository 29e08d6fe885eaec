"""What a pass adds to an answer, for whoever wants it before the answer is whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specfit_serve.stats import Round

FinishReason = Literal["stop", "length", "repetition"]


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the target found a token, and what it found likeliest in its place.

    Natural logarithms, of its distribution as it comes: at temperature 1, without a nucleus.
    """

    logprob: float
    top_ids: list[int]  # the likeliest first
    top_logprobs: list[float]


@dataclass(frozen=True)
class Emitted:
    """What one pass added to one answer."""

    id: str  # the request's
    tokens: list[int]
    round: Round | None  # None: the first token, which the prefill gives
    logprobs: list[TokenLogprobs] | None  # one a token, where the request asks for them
    finish_reason: FinishReason | None  # None: there is more to come


def logprobs_of(
    logits: Float[Tensor, "seq vocab"], tokens: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Of `tokens`, the first of which was chosen by the first row of `logits`, and so on.

    Each with the `num_top` likeliest tokens of its row.
    """
    logprobs = torch.log_softmax(logits[: len(tokens)].float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    rows = zip(chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprobs(*row) for row in rows]
