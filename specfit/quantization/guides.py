"""What selectors expect of sets, before any is judged by the text that decides."""

import logging
from dataclasses import dataclass

from specfit.quantization import gram, in_context
from specfit.quantization.config import Selector
from specfit.quantization.measured import Measured, Text
from specfit.quantization.proposals import Predictor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guides:
    """A predictor for each selector that was asked for, and how far each is to be trusted."""

    predictors: dict[Selector, Predictor]
    blend: Predictor | None  # of pairs alone and of units among others; of a portfolio only
    rho_reliability: float | None
    # On random sets, and half a text, that the predictor has not seen, both halves in turn.
    cv_r2: dict[str, float]


def guides_of(
    measured: Measured, selector: Selector, *, share: float, num_sets: int, seed: int
) -> Guides:
    """Measures what the predictors of a selector are made of.

    Args:
        measured: the target.
        selector: one that proposes, or the portfolio of all of them.
        share: of the bytes, about which sets are measured.
        num_sets: random sets that `additive` and `coverage` are fitted to.
        seed: of those sets.
    """
    alone = measured.alone()
    alone_nats = alone.mean_kl_nats
    predictors = {Selector.isolated: Predictor.of_alone(alone_nats)}
    reliability, cv_r2, blend = None, {}, None
    if selector in (Selector.gram, Selector.portfolio):
        reliability = gram.reliability(*alone.gram_halves)
        pairs = gram.shrunk(*alone.gram_halves)
        predictors[Selector.gram] = Predictor.of_gram(pairs)
    if selector in (Selector.additive, Selector.coverage, Selector.portfolio):
        sets = in_context.random_sets(measured.costs, share, num_sets, seed)
        kl = measured.kls(sets, Text.calibration, "random sets")
        for s, predictor in predictors.items():
            cv_r2[s.name] = in_context.r2_on_halves(predictor(sets), kl)
        if selector is not Selector.coverage:
            additive = in_context.additive(sets, kl, alone_nats)
            predictors[Selector.additive] = Predictor.of_additive(additive)
            cv_r2[Selector.additive.name] = additive.cv_r2
        if selector is not Selector.additive:
            coverage = in_context.coverage(sets, kl, alone_nats)
            predictors[Selector.coverage] = Predictor.of_coverage(coverage)
            cv_r2[Selector.coverage.name] = coverage.cv_r2
        if selector is Selector.portfolio:
            blend = Predictor.of_blend(pairs, additive)
    log.info("quantize: rho_reliability %s, cv_r2 %s", reliability, cv_r2)
    return Guides(predictors, blend, reliability, cv_r2)
