"""What the sampling kernels compute, in torch: their definition, and the oracle of their tests.

Logits are of the rows of a batch, k + 1 tokens of each: the newest token and the k drafted. They
decide how much of the draft the target keeps, and which token it adds, as `specfit_serve.verify`
does on a CPU.

A chunk's largest logit and its id are one number, `best`: the upper 32 bits order as the logits do,
and the lower 31 are the larger the lower the id is. The largest of a token's numbers is its argmax.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64, Int32, Int64
from torch import Tensor

CHUNK = 2048  # logits
_LAST_ID = 0x7FFFFFFF


@dataclass(frozen=True)
class Acceptance:
    """The outcome of a round, and what the kernels hand each other on the way."""

    num_kept: Int32[Tensor, " rows"]  # 0..the row's draft length
    own_tokens: Int64[Tensor, " rows"]
    emitted: Int64[Tensor, "rows seq"]  # what is kept, the own token, and -1 behind it
    best: Int64[Tensor, "tokens chunks"]
    powers: Float32[Tensor, "tokens chunks"]  # Σ e^((logit - the chunk's largest) / temperature)
    # Of the token at which the row ends: the softmax's largest logit and sum, its argmax and the
    # rejected token or -1; and the probability in each chunk, without and with what was rejected.
    tops: Float32[Tensor, " rows"]
    totals: Float32[Tensor, " rows"]
    choices: Int64[Tensor, "rows 2"]
    masses: Float64[Tensor, "rows 2 chunks"]

    @classmethod
    def empty(
        cls, num_rows: int, num_draft_tokens: int, vocab_size: int, device: torch.device
    ) -> "Acceptance":
        """Uninitialized memory for drafts of up to `num_draft_tokens`."""
        seq, num_chunks = num_draft_tokens + 1, -(-vocab_size // CHUNK)
        return cls(
            torch.empty(num_rows, dtype=torch.int32, device=device),
            torch.empty(num_rows, dtype=torch.int64, device=device),
            torch.empty(num_rows, seq, dtype=torch.int64, device=device),
            torch.empty(num_rows * seq, num_chunks, dtype=torch.int64, device=device),
            torch.empty(num_rows * seq, num_chunks, device=device),
            torch.empty(num_rows, device=device),
            torch.empty(num_rows, device=device),
            torch.empty(num_rows, 2, dtype=torch.int64, device=device),
            torch.empty(num_rows, 2, num_chunks, dtype=torch.float64, device=device),
        )


def argmax_partials(
    logits: Float32[Tensor, "tokens vocab"],
    best: Int64[Tensor, "tokens chunks"],
    *,
    pdl: bool = False,
) -> None:
    """Writes each chunk's largest logit with its id; a NaN is larger than all."""
    del pdl  # of a launch, and here is none
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)  # of -0.0, too
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(logits.isnan(), 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    ranked = (keys.long() << 32) | (_LAST_ID - ids)
    best.copy_(torch.stack([chunk.amax(1) for chunk in torch.split(ranked, CHUNK, 1)], dim=1))


def argmax(
    best: Int64[Tensor, "tokens chunks"], out: Int64[Tensor, " tokens"], *, pdl: bool = False
) -> None:
    """Writes the first of the largest logits' ids."""
    del pdl
    out.copy_(_LAST_ID - (best.amax(1) & _LAST_ID))


def accept(
    draft_tokens: Int64[Tensor, "rows k"],
    draft_lengths: Int64[Tensor, " rows"],
    out: Acceptance,
    *,
    pdl: bool = False,
) -> None:
    """Keeps the drafted tokens that are the argmax of `out.best`, up to the first other."""
    del pdl
    choices = torch.empty_like(out.emitted)
    argmax(out.best, choices.view(-1))
    num_kept = _num_leading(draft_tokens == choices[:, :-1], draft_lengths)
    _emit(draft_tokens, num_kept, choices.gather(1, num_kept[:, None]).squeeze(1), out)


def accept_sampled(
    logits: Float32[Tensor, "tokens vocab"],
    draft_tokens: Int64[Tensor, "rows k"],
    draft_lengths: Int64[Tensor, " rows"],
    draft_probs: Float32[Tensor, "rows k vocab"] | None,
    temperatures: Float32[Tensor, " rows"],
    uniforms: Float[Tensor, "rows seq"],
    out: Acceptance,
    *,
    pdl: bool = False,
) -> None:
    """Keeps a prefix of the draft, so that what is emitted is distributed as the target's samples.

    Drafted token t is kept with probability min(1, target[t] / draft[t]). The first that is not
    gives way to a sample of max(0, target - draft), normalized; when all are kept, the target gives
    one more. Without `draft_probs` each drafted token was the only one possible. At a temperature
    of 0 the target has one token, its argmax. A row's first uniform, of [0, 1), draws its own
    token, the others decide on the draft. What is drafted beyond a row's length is not looked at.

    Source: Leviathan et al. 2023, arXiv:2211.17192.
    """
    del pdl
    num_rows, seq = uniforms.shape
    target = _target_probs(logits.view(num_rows, seq, -1), temperatures)
    inside = torch.arange(seq - 1, device=logits.device) < draft_lengths[:, None]
    drafted = draft_tokens.masked_fill(~inside, 0)[..., None]
    if draft_probs is None:
        draft = torch.zeros_like(target[:, :-1]).scatter(-1, drafted, 1.0)
    else:
        draft = draft_probs
    limits = uniforms[:, 1:].double() * draft.gather(-1, drafted).squeeze(-1)
    kept = limits < target[:, :-1].gather(-1, drafted).squeeze(-1)
    num_kept = _num_leading(kept, draft_lengths)

    rows = torch.arange(num_rows, device=logits.device)
    own = target[rows, num_kept]
    if seq > 1:
        rejected = num_kept < draft_lengths
        residual = (own - draft[rows, num_kept.clamp(max=seq - 2)]).clamp(min=0)
        # Where rounding leaves nothing, target and draft are equal and either will do.
        has_residual = rejected & (residual.sum(-1) > 0)
        own = torch.where(has_residual[:, None], residual, own)
    cumulative = own.double().cumsum(-1)
    points = uniforms[:, :1].double() * cumulative[:, -1:]
    own_tokens = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    _emit(draft_tokens, num_kept, own_tokens, out)


def _target_probs(
    logits: Float32[Tensor, "rows seq vocab"], temperatures: Float32[Tensor, " rows"]
) -> Float32[Tensor, "rows seq vocab"]:
    greedy = (temperatures == 0)[:, None, None]
    probs = torch.softmax(logits / torch.where(greedy, 1.0, temperatures[:, None, None]), dim=-1)
    best = logits.argmax(-1, keepdim=True)
    return torch.where(greedy, torch.zeros_like(probs).scatter(-1, best, 1.0), probs)


def _num_leading(kept: Tensor, lengths: Int64[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    inside = torch.arange(kept.shape[1], device=kept.device) < lengths[:, None]
    return (kept & inside).long().cumprod(1).sum(1)


def _emit(
    draft_tokens: Int64[Tensor, "rows k"],
    num_kept: Int64[Tensor, " rows"],
    own_tokens: Int64[Tensor, " rows"],
    out: Acceptance,
) -> None:
    out.num_kept.copy_(num_kept)
    out.own_tokens.copy_(own_tokens)
    places = torch.arange(out.emitted.shape[1], device=num_kept.device)
    own = torch.where(places == num_kept[:, None], own_tokens[:, None], -1)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1))
    out.emitted.copy_(torch.where(places < num_kept[:, None], padded, own))
