"""How faithful a changed target is, in figures with intervals, and the gate that they must pass.

All figures are over the tokens that the target wrote, as it is and as it was changed read them:

kl_*_nats           divergence of the changed target's next-token distribution: Σ p (log p - log q)
top1_agreement      share of tokens at which both have the same most likely one
perplexity_change   of the text, as a share: exp(mean log p(text) - mean log q(text)) - 1

Intervals are percentiles over resampled sequences, since the tokens of one are alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specfit_serve.bootstrap import percentiles, resamples

NUM_BOOTSTRAP = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class TokenFigures:
    """What was seen at each token."""

    kl: Float[Tensor, "sequences tokens"]  # nats
    same_top: Bool[Tensor, "sequences tokens"]
    log_p: Float[Tensor, "sequences tokens"]  # of the token that follows, by the target as it is
    log_q: Float[Tensor, "sequences tokens"]  # by the changed one

    @classmethod
    def of(
        cls,
        log_p: Float[Tensor, "tokens vocab"],
        log_q: Float[Tensor, "tokens vocab"],
        following: Int[Tensor, "tokens"],
    ) -> "TokenFigures":
        """Of one sequence."""
        return cls(
            kl=(log_p.exp() * (log_p - log_q)).sum(-1)[None],
            same_top=(log_p.argmax(-1) == log_q.argmax(-1))[None],
            log_p=log_p.gather(-1, following[:, None]).T,
            log_q=log_q.gather(-1, following[:, None]).T,
        )

    @classmethod
    def joined(cls, parts: "Sequence[TokenFigures]") -> "TokenFigures":
        """Of all sequences, on the CPU."""
        names = ("kl", "same_top", "log_p", "log_q")
        return cls(**{name: torch.cat([getattr(p, name) for p in parts]).cpu() for name in names})

    def row(self, seed: int) -> dict[str, float | int | None]:
        """Each figure with its interval, as fidelity.json has it: None where it is not finite."""
        found: dict[str, float | int] = {
            "num_sequences": len(self.kl),
            "num_tokens": self.kl.numel(),
            "kl_max_nats": float(self.kl.max()),
        }
        drawn: dict[str, list[Tensor]] = {name: [] for name in _FIGURES}
        for rows in resamples(len(self.kl), NUM_BOOTSTRAP, seed):
            resampled = self._rows(rows)
            for name, figure in _FIGURES.items():
                drawn[name].append(figure(resampled))
        for name, figure in _FIGURES.items():
            low, high = percentiles(torch.stack(drawn[name]), CONFIDENCE)
            found |= {name: float(figure(self)), f"{name}_low": low, f"{name}_high": high}
        return {name: value if isfinite(value) else None for name, value in found.items()}

    def _rows(self, rows: Int[Tensor, "drawn"]) -> "TokenFigures":
        return TokenFigures(self.kl[rows], self.same_top[rows], self.log_p[rows], self.log_q[rows])


def _kl_quantile(share: float) -> Callable[[TokenFigures], Tensor]:
    return lambda t: t.kl.flatten().double().quantile(share)


_FIGURES: dict[str, Callable[[TokenFigures], Tensor]] = {
    "kl_mean_nats": lambda t: t.kl.double().mean(),
    "kl_median_nats": _kl_quantile(0.5),
    "kl_p95_nats": _kl_quantile(0.95),
    "kl_p99_nats": _kl_quantile(0.99),
    "top1_agreement": lambda t: t.same_top.double().mean(),
    "perplexity_change": lambda t: (t.log_p.double().mean() - t.log_q.double().mean()).expm1(),
}


@dataclass(frozen=True)
class Limit:
    """What a figure must keep, at the worse end of its interval where it has one."""

    figure: str
    at_most: float | None = None
    at_least: float | None = None

    def broken_by(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong, in words; None where the limit is kept."""
        if self.at_most is not None:
            worst = row[f"{self.figure}_high"]
            kept = worst is not None and worst <= self.at_most
            words = f"at most {self.at_most:g}"
        else:
            assert self.at_least is not None
            worst = row.get(f"{self.figure}_low", row[self.figure])
            kept = worst is not None and worst >= self.at_least
            words = f"at least {self.at_least:g}"
        return None if kept else f"{self.figure} must be {words}, got {_shown(worst)}"


# Below these the ends of an interval say nothing: a percentile of resampled sequences needs some.
ENOUGH_TEXT = [Limit("num_sequences", at_least=16.0), Limit("num_tokens", at_least=1000.0)]
GATES = {
    "strict": [Limit("kl_mean_nats", at_most=0.01), Limit("top1_agreement", at_least=0.98)],
    "production": [
        Limit("kl_mean_nats", at_most=0.06),
        Limit("top1_agreement", at_least=0.93),
        Limit("perplexity_change", at_most=0.01),
    ],
}


def other_than_measured(measured: Mapping[str, str], written: Mapping[str, str]) -> list[str]:
    """Whether a checkpoint, read back, is the target that was measured before it was written.

    Args:
        measured: digests of that target, with its units quantized in memory.
        written: of the checkpoint.

    Returns:
        What is wrong, in words; empty where the two are one. A scale or a matrix in the wrong place
        can be too small a fault for a gate, but never for this.
    """
    names = sorted(measured.keys() | written.keys())
    other = [name for name in names if measured.get(name) != written.get(name)]
    if not other:
        return []
    return [
        f"the checkpoint must be what was measured, bit for bit, got {len(other)} other tensors, "
        f"such as {other[0]}"
    ]


def beyond_budget(kl_nats: float, row: Mapping[str, Any]) -> list[str]:
    """Whether a checkpoint costs more than its ceiling of KL, on text that nothing was chosen by.

    The set was chosen by the upper end of its interval on another text. This text refutes that only
    where its whole interval is above the ceiling: by the upper end here, too, most sets that use
    their budget up would be refused for the width of two intervals.
    """
    low = row["kl_mean_nats_low"]
    if low is not None and low <= kl_nats:
        return []
    words = f"kl_mean_nats must be at most quantize.budget, {kl_nats:g}"
    return [f"{words}, got {_shown(low)} at the lower end of its interval"]


def broken_limits(gate: str, row: Mapping[str, Any]) -> list[str]:
    """Of the gate `strict` or `production`, on text that nothing was chosen by; empty: passed."""
    limits = [*ENOUGH_TEXT, *GATES[gate]]
    return [words for limit in limits if (words := limit.broken_by(row)) is not None]


def _shown(value: float | int | None) -> str:
    return "no finite number" if value is None else f"{value:.4g}"
