"""How many tokens to draft: what a token takes by k, from what was measured at one k."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from specfit.traffic.mixture import PLAIN, Share, normalized, of_first_head

MIX = "all"


def chosen(rows: Sequence[Mapping[str, Any]], shares: Sequence[Share]) -> dict[str, Any] | None:
    """The k with the fewest milliseconds a token, of each component and of the mix.

    A measurement at k says what shorter drafts would have brought: the first i of its tokens were
    kept as often as they would be alone. A pass over i + 1 tokens is taken to cost what lies on the
    line between plain decoding's and the one that was timed. None: no tokens/s were measured.

    What a round took is of the answers that were timed, which are few: their acceptance length is
    not that of all.

    Args:
        rows: of acceptance.json.
        shares: of the components, by which the mix weighs them: milliseconds a token are a mean
            over tokens.
    """
    by_component: dict[str, list[float]] = {}
    for row in _longest(rows):
        plain = next(
            r
            for r in rows
            if r["proposer"] == PLAIN
            and (r["component"], r["temperature"]) == (row["component"], row["temperature"])
        )
        if "timed_acceptance_length" not in row or "tokens_per_second" not in plain:
            return None
        by_component[row["component"]] = _ms_a_token(row, plain)
    weights = normalized({s.component: s.tokens for s in shares if s.component in by_component})
    widest = min(map(len, by_component.values()))
    mixed = [sum(weights[n] * by_component[n][k] for n in weights) for k in range(widest)]
    found = {**by_component, MIX: mixed}
    return {
        "best": {name: times.index(min(times)) for name, times in found.items()},
        "rows": [
            {"component": name, "num_draft_tokens": k, "ms_per_token": ms}
            for name, times in found.items()
            for k, ms in enumerate(times)
        ],
    }


def _longest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The fitted head's rows at the largest k: they say what each shorter draft brings."""
    head = of_first_head(rows)[0]["proposer"]
    most = max(row["num_draft_tokens"] for row in rows if row["proposer"] == head)
    return of_first_head(
        [r for r in rows if (r["proposer"], r["num_draft_tokens"]) == (head, most)]
    )


def _ms_a_token(row: Mapping[str, Any], plain: Mapping[str, Any]) -> list[float]:
    """Of k = 0, 1, ... as many as were drafted."""
    most = row["num_draft_tokens"]
    seconds = row["timed_acceptance_length"] / row["tokens_per_second"]  # of a round
    draft = row["draft_time_share"] * seconds / most
    one, all_ = 1 / plain["tokens_per_second"], (1 - row["draft_time_share"]) * seconds
    lengths = accumulate(row["acceptance_by_position"], initial=1.0)
    return [
        1e3 * (one + (all_ - one) * k / most + k * draft) / length
        for k, length in enumerate(lengths)
    ]
