"""What was predicted, beside what `measure` timed on the same machine."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specfit.prediction.model import LatencyModel

PLAIN = "none"
Row = Mapping[str, Any]


def check_rows(
    measured: Sequence[Row], model: LatencyModel, proposer: str
) -> Iterator[dict[str, Any]]:
    """Rows of kind `check`: ms a token of one request alone, by component and k; 0: plain decoding.

    The prediction is of the answers that were timed: with their acceptance length and context, so
    that what differs is what passes and drafts take.
    """
    for row in measured:
        known = "timed_acceptance_length" in row and row["proposer"] in (PLAIN, proposer)
        if not known:
            continue
        k = 0 if row["proposer"] == PLAIN else row["num_draft_tokens"]
        split = model.round_split(1, k, row["timed_context_tokens"])
        predicted = 1e3 * split.total / row["timed_acceptance_length"]
        taken = 1e3 / row["tokens_per_second"]
        found = {
            "kind": "check",
            "component": row["component"],
            "temperature": row["temperature"],
            "num_draft_tokens": k,
            "measured_ms_per_token": taken,
            "predicted_ms_per_token": predicted,
            "predicted_over_measured": predicted / taken,
        }
        for end, other in (("low", "high"), ("high", "low")):
            if f"tokens_per_second_{other}" in row:
                found[f"measured_ms_per_token_{end}"] = 1e3 / row[f"tokens_per_second_{other}"]
        yield found
