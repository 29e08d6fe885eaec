"""The configuration of `measure`."""

from dataclasses import dataclass, field

from specfit.checks import require, require_positive


@dataclass
class MeasureConfig:
    """Draft-and-verify decoding of held-out conversations."""

    num_draft_tokens: list[int] = field(default_factory=lambda: [4])
    # null: each component's own; a list: measured at each of these
    temperatures: list[float] | None = None
    max_new_tokens: int = 128
    batch_size: int = 8  # sequences decoded at once; tokens/s are measured at one
    num_timed: int = 3  # prompts of each component decoded alone, for tokens/s
    num_bootstrap: int = 2000  # resamples of the prompts behind each interval
    confidence: float = 0.95
    ngram_min: int = 2  # the shortest and longest suffix that prompt lookup matches
    ngram_max: int = 4
    # The least acceptance length of any component: below it, at the lower end of its interval, the
    # head is rejected (exit code 3). null: none is rejected.
    floor: float | None = None
    # Heads to measure beside the fitted one, by the names they get: folders of `train` artifacts.
    speculators: dict[str, str] = field(default_factory=dict)
    # Under quantize.budget: also fit a head to the target before it was quantized, and measure it.
    full_precision_head: bool = False

    def __post_init__(self) -> None:
        ks = self.num_draft_tokens
        distinct = len(set(ks)) == len(ks) > 0 and min(ks) >= 1
        require(distinct, "measure.num_draft_tokens", "be distinct numbers from 1 on", ks)
        temperatures = self.temperatures
        distinct = temperatures is None or len(set(temperatures)) == len(temperatures) > 0
        require(distinct, "measure.temperatures", "be null or distinct numbers", temperatures)
        require_positive(
            self,
            "measure",
            "max_new_tokens",
            "batch_size",
            "num_timed",
            "num_bootstrap",
            "ngram_min",
        )
        floor = self.floor
        require(floor is None or floor >= 1, "measure.floor", "be at least 1, or null", floor)
        taken = {"none", "ngram", "eagle3", "full_precision"} & set(self.speculators)
        require(not taken, "measure.speculators", "have names of their own", ", ".join(taken))
        require(0 < self.confidence < 1, "measure.confidence", "lie in (0, 1)", self.confidence)
        require(
            self.ngram_max >= self.ngram_min,
            "measure.ngram_max",
            f"be at least measure.ngram_min ({self.ngram_min})",
            self.ngram_max,
        )
        require(
            all(t >= 0 for t in self.temperatures or []),
            "measure.temperatures",
            "be at least 0 each",
            self.temperatures,
        )
