"""The page of a matrix: heads by profiles, in one table and one heat map."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from specfit.files import write_json
from specfit.report import pages, plots
from specfit.report.document import Cell, Column, Document, Image, Section, Table, Text
from specfit.report.figures import estimate, number, percent_change

Row = Mapping[str, Any]


def write(folder: Path, rows: Sequence[Row], confidence: float) -> None:
    """Writes matrix.json, matrix.html, matrix.md and the heat map."""
    write_json(folder / "matrix.json", {"rows": list(rows), "confidence": confidence})
    document = Document(
        "Heads by profiles",
        verdict(rows),
        [],
        [section(folder, rows, confidence)],
    )
    pages.write(folder, "matrix", document)


def verdict(rows: Sequence[Row]) -> str:
    """Whether each profile's own head is the best on it, as far as the intervals tell."""
    said = []
    for profile in dict.fromkeys(row["profile"] for row in rows):
        others = [row for row in rows if row["profile"] == profile and row["head"] != profile]
        if not others:
            continue
        worse = [row["head"] for row in others if row["change_high"] < 0]
        better = [row["head"] for row in others if row["change_low"] > 0]
        same = [row["head"] for row in others if row["head"] not in worse + better]
        parts = [
            f"{words} {', '.join(heads)}"
            for words, heads in (
                ("longer than", worse),
                ("not told apart from", same),
                ("shorter than", better),
            )
            if heads
        ]
        said.append(f"On {profile} its own head's acceptance length is {'; '.join(parts)}.")
    off = [row for row in rows if row["head"] != row["profile"]]
    if off:
        worst = min(off, key=lambda row: float(row["change"]))
        said.append(
            f"The largest loss off the diagonal: {worst['head']} on {worst['profile']}, "
            f"{percent_change(worst, 'change')} %."
        )
    return " ".join(said)


def section(folder: Path, rows: Sequence[Row], confidence: float) -> Section:
    """The heat map and the tables."""
    heads = list(dict.fromkeys(row["head"] for row in rows))
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    place = {(row["head"], row["profile"]): row for row in rows}
    seeds = rows[0]["num_seeds"]
    level = f"{100 * confidence:g} % intervals over seeds and sessions"
    ks = ", ".join(f"{k}" for k in sorted({row["num_draft_tokens"] for row in rows}))
    heat = ", ".join(f"{t:g}" for t in sorted({t for row in rows for t in row["temperatures"]}))

    def table(caption: str, cell: Any) -> Table:
        found: list[list[Cell]] = [
            [head, *(cell(place[head, p]) if (head, p) in place else "" for p in profiles)]
            for head in heads
        ]
        columns = [Column(p, numeric=True, group="profile") for p in profiles]
        return Table(caption, [Column("head fitted to"), *columns], found)

    return Section(
        "Heads by profiles",
        [
            _heat_map(folder, heads, profiles, place),
            table(
                f"Acceptance length of the profile's mix at k = {ks} and temperature {heat}, "
                f"{seeds} seeds together; {level}.",
                lambda row: estimate(row, "acceptance_length"),
            ),
            table(
                "The same, from the profile's own head, in percent; both on the same prompts.",
                lambda row: "" if row["head"] == row["profile"] else percent_change(row, "change"),
            ),
            table(
                "Each seed alone.",
                lambda row: " / ".join(number(length, 2) for length in row["by_seed"]),
            ),
            table(
                "The change of each seed, in percent: of few seeds, what they agree on counts.",
                lambda row: " / ".join(f"{100 * c:+.1f}" for c in row["change_by_seed"]),
            ),
            Text(
                "A head's training is another one with each seed: other conversations, another "
                "order. What lies within an interval is no difference."
            ),
        ],
    )


def _heat_map(
    folder: Path,
    heads: Sequence[str],
    profiles: Sequence[str],
    place: Mapping[tuple[str, str], Row],
) -> Image:
    changes = np.full((len(heads), len(profiles)), np.nan)
    for (head, profile), row in place.items():
        changes[heads.index(head), profiles.index(profile)] = 100 * row["change"]
    most = max(1.0, float(np.nanmax(np.abs(changes))))
    with matplotlib.rc_context(plots.STYLE):
        size = (1.8 + 1.4 * len(profiles), 0.9 + 0.55 * len(heads))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        picture = axes.imshow(changes, cmap="PuOr", vmin=-most, vmax=most, aspect="auto")
        axes.set_xticks(range(len(profiles)), profiles)
        axes.set_yticks(range(len(heads)), heads)
        axes.set(xlabel="profile", ylabel="head fitted to")
        for (head, profile), row in place.items():
            x, y = profiles.index(profile), heads.index(head)
            dark = abs(changes[y, x]) > 0.6 * most
            axes.text(
                x,
                y,
                f"{row['acceptance_length']:.2f}",
                ha="center",
                va="center",
                color="white" if dark else plots.INK,
            )
        bar = figure.colorbar(picture, ax=axes)
        bar.set_label("% from the profile's own head")
    plots.save(folder / "matrix.png", figure)
    return Image(
        "matrix.png",
        "Heat map of acceptance length: heads in rows, profiles in columns.",
        "Acceptance length of each head on each profile, coloured by its change from the profile's "
        "own head.",
    )
