"""Where greedy answers of a quantized target leave those of the target as it was."""

from collections.abc import Sequence
from typing import Any

from specfit.answering import answer_plainly
from specfit.engine import DecodeEngine
from specfit.quantization.texts import BATCH_SIZE, Answered, TextSettings
from specfit_serve.decode import Request


def first_differences(
    engine: DecodeEngine, answered: Sequence[Answered], settings: TextSettings
) -> dict[str, Any]:
    """Of the answers that were greedy, the index of the first token that another target gives.

    `settings.num_counted` stands for none within so many tokens.
    """
    recorded = {a.id: a for a in answered if settings.temperatures[a.component] == 0}
    firsts: list[int] = []
    for found in answer_plainly(
        engine,
        [Request(a.id, a.prompt, 0.0) for a in recorded.values()],
        max_new_tokens=settings.num_counted,
        batch_size=BATCH_SIZE,
        label="quantize: rollouts",
    ):
        plain = recorded[found.id].answer[: settings.num_counted]
        same = [a == b for a, b in zip(plain, found.tokens, strict=False)]
        firsts.append(same.index(False) if False in same else len(same))
    firsts.sort()
    return {
        "num_rollouts": len(firsts),
        "num_tokens": settings.num_counted,
        "first_differing_tokens": firsts,
        "num_equal": sum(first == settings.num_counted for first in firsts),
        "first_differing_token_median": _median(firsts, settings.num_counted),
    }


def _median(firsts: Sequence[int], num_tokens: int) -> int | None:
    """Of what is sorted; None where the median answer does not differ, or there is none."""
    median = firsts[len(firsts) // 2] if firsts else num_tokens
    return median if median < num_tokens else None
