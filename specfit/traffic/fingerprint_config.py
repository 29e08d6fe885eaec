"""The configuration of fingerprints and of drift."""

from dataclasses import dataclass

from specfit.checks import require, require_positive

INFINITY = float("inf")


@dataclass
class FingerprintConfig:
    """Counts of the traffic that may leave it, with the noise that protects each request."""

    requests: str | None = None  # JSON lines, a request each; null or `-`: standard input
    # What is counted, in your words: it is written into the release. A window is released once.
    window: str | None = None
    epsilon: float = 1.0  # of the whole release, for one request more or less
    min_requests: int = 200  # windows with fewer, after noise, are suppressed
    # What may be spent in any `period_days` in a row, and where spends are kept: one ledger for all
    # who release counts of this traffic.
    budget: float = 4.0
    period_days: float = 30.0
    ledger: str | None = None  # null: fingerprint-ledger.json in runtime.root
    num_draft_tokens: int = 0  # at which the traffic is served; 0: accepted counts are not released

    def __post_init__(self) -> None:
        for name in ("epsilon", "budget", "period_days"):
            value = getattr(self, name)
            require(0 < value < INFINITY, f"fingerprint.{name}", "be positive", value)
        within = self.epsilon <= self.budget
        most = f"be at most fingerprint.budget ({self.budget:g})"
        require(within, "fingerprint.epsilon", most, self.epsilon)
        require_positive(self, "fingerprint", "min_requests")
        k = self.num_draft_tokens
        require(k >= 0, "fingerprint.num_draft_tokens", "be at least 0", k)


@dataclass
class DriftConfig:
    """Two profiles, and what follows from how far they are apart."""

    # A profile's name, a profile's file, a fingerprint's release, or a log.
    old: str | None = None  # that the draft model was fitted to
    new: str | None = None  # that it meets now
    proposer: str = "eagle3"  # whose measured acceptance decides
    num_draft_tokens: int | None = None  # at which; null: the most that were measured
    # Relative change of acceptance length: above the first the draft model is kept, above the
    # second it is refitted, else trained anew.
    reuse_above: float = -0.02
    refit_above: float = -0.15
    max_unmeasured: float = 0.02  # of the requests may be of components that were not measured
    # Without measured acceptance: total variation between the mixes, beyond which to refit.
    max_distance: float = 0.1

    def __post_init__(self) -> None:
        ordered = -1 < self.refit_above < self.reuse_above < INFINITY
        below = f"lie between -1 and drift.reuse_above ({self.reuse_above:g})"
        require(ordered, "drift.refit_above", below, self.refit_above)
        for name in ("max_unmeasured", "max_distance"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"drift.{name}", "lie in [0, 1]", value)
        k = self.num_draft_tokens
        require(k is None or k >= 1, "drift.num_draft_tokens", "be at least 1, or null", k)
