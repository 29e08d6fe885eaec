"""The page of `fit`: source, component and weight, what was capped, and what can be drafted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specfit.report import pages
from specfit.report.document import Block, Cell, Column, Document, Section, Table, Text
from specfit.report.figures import number, share

Record = Mapping[str, Any]


def write_page(folder: Path, record: Record) -> None:
    """Writes fit.html and fit.md."""
    capped = [row["component"] for row in record["mixture"] if row["capped"]]
    said = f"Capped: {', '.join(capped)}." if capped else "Nothing is capped."
    document = Document(
        "The training mixture",
        f"Mixture {record['config']['mixture']}, {share(record['config']['floor'])} of it shared "
        f"out evenly. {said}",
        [],
        [mixture(record), coverage(record)],
    )
    pages.write(folder, "fit", document)


def mixture(record: Record) -> Section:
    """What of the profile becomes what of the training."""
    components: list[list[Cell]] = [
        [
            row["component"],
            share(row["requests"]),
            share(row["tokens"]),
            share(row["training"]),
            share(row["taken"]),
            number(row["num_tokens"]),
            f"{row['num_documents']:,} of {row['num_there']:,}",
            number(row["repeats"], 2),
            row["capped"],
        ]
        for row in record["mixture"]
    ]
    blocks: list[Block] = [
        Table(
            "From the profile to the training. Shares of tokens are of the answers, which is what "
            "is learned; wanted is what the mixture asks for, given what an epoch shows.",
            [
                Column("component"),
                Column("requests", numeric=True, group="of the profile"),
                Column("output tokens", numeric=True, group="of the profile"),
                Column("wanted", numeric=True, group="of the training"),
                Column("given", numeric=True, group="of the training"),
                Column("answer tokens", numeric=True),
                Column("answers", numeric=True),
                Column("times each", numeric=True),
                Column("capped"),
            ],
            components,
        ),
        _sources(record),
    ]
    if record["num_draft_tokens"] is not None:
        blocks.append(_draft_length(record["num_draft_tokens"]))
    else:
        blocks.append(
            Text("k is not chosen here: no earlier head was measured (fit.measured is null).")
        )
    return Section("Training mixture", blocks)


def _sources(record: Record) -> Table:
    rows: list[list[Cell]] = [
        [
            row["source"],
            row["component"],
            share(row["weight"]),
            number(row["num_documents"]),
            number(row["num_tokens"]),
        ]
        for row in record["sources"]
    ]
    return Table(
        "From source to component to weight.",
        [
            Column("source"),
            Column("component"),
            Column("weight", numeric=True),
            Column("answers", numeric=True),
            Column("answer tokens", numeric=True),
        ],
        rows,
    )


def _draft_length(found: Record) -> Table:
    ks = sorted({row["num_draft_tokens"] for row in found["rows"]})
    by_place = {
        (row["component"], row["num_draft_tokens"]): row["ms_per_token"] for row in found["rows"]
    }
    rows: list[list[Cell]] = [
        [name, str(best), *(number(by_place.get((name, k)), 2) for k in ks)]
        for name, best in found["best"].items()
    ]
    return Table(
        "Milliseconds a token by k, as an earlier head's measured acceptance and times give them.",
        [
            Column("component"),
            Column("best k", numeric=True),
            *(Column(f"k = {k}", numeric=True, group="ms a token") for k in ks),
        ],
        rows,
    )


def coverage(record: Record) -> Section:
    """What the draft vocabulary can say."""
    rows: list[list[Cell]] = [
        [row["component"], row["split"], share(row["coverage"]), number(row["num_tokens"])]
        for row in record["rows"]
    ]
    return Section(
        "Draft vocabulary",
        [
            Table(
                f"{number(record['draft_vocab_size'])} of the target's "
                f"{number(record['target_vocab_size'])} tokens can be drafted.",
                [
                    Column("component"),
                    Column("split"),
                    Column("coverage", numeric=True),
                    Column("answer tokens", numeric=True),
                ],
                rows,
            )
        ],
    )
