"""The prediction beside what was timed."""

from collections.abc import Mapping, Sequence
from typing import Any

from specfit.report.document import Cell, Column, Table
from specfit.report.figures import estimate, number


def checked(rows: Sequence[Mapping[str, Any]]) -> Table:
    """By component and k."""
    found: list[list[Cell]] = [
        [
            row["component"],
            str(row["num_draft_tokens"]),
            estimate(row, "measured_ms_per_token"),
            number(row["predicted_ms_per_token"], 2),
            number(row["predicted_over_measured"], 2),
        ]
        for row in sorted(rows, key=lambda r: (r["component"], r["num_draft_tokens"]))
    ]
    return Table(
        "The prediction beside what `measure` timed: ms a token of one request alone, with the "
        "range of the prompts timed, at these answers' own acceptance length and context.",
        [
            Column("component"),
            Column("k", numeric=True),
            Column("measured", numeric=True, group="ms a token"),
            Column("predicted", numeric=True, group="ms a token"),
            Column("predicted over measured", numeric=True),
        ],
        found,
    )
