"""The sections on how the head was made, from its training back to its provenance."""

import json
from typing import Any

from specfit.report.document import Block, Cell, Code, Column, Image, Section, Table, Text
from specfit.report.figures import (
    DASH,
    NOT_MEASURED,
    duration,
    estimate,
    number,
    share,
)

Record = dict[str, Any]


def training(
    train: Record, log: list[Record], evals: list[Record], images: dict[str, Image]
) -> Section:
    """The run, and the checkpoint that was kept by measured acceptance."""
    last = log[-1] if log else {}
    accuracy = ", ".join(share(a) for a in last.get("accuracy", [])) or NOT_MEASURED
    facts: list[list[Cell]] = [
        ["parameters of the head", number(train.get("num_parameters"))],
        ["loss", str(train.get("loss", NOT_MEASURED))],
        ["drafting steps unrolled", number(train.get("ttt_steps"))],
        ["optimizer steps", number(train.get("num_steps"))],
        ["kept after step", number(train.get("kept_step"))],
        ["time", duration(train.get("seconds"))],
        ["loss at the end", number(last.get("loss"), 3)],
        ["accuracy at the end, by drafting step", accuracy],
    ]
    blocks: list[Block] = [images["training"]] if "training" in images else []
    blocks.append(Table("The run.", [Column("what"), Column("value", numeric=True)], facts))
    if evals:
        blocks.append(_evals(evals, train.get("kept_step")))
    else:
        blocks.append(Text(f"Acceptance on validation conversations: {NOT_MEASURED}."))
    return Section("Training", blocks)


def _evals(evals: list[Record], kept_step: int | None) -> Table:
    components = list(dict.fromkeys(name for row in evals for name in row.get("by_component", {})))
    rows: list[list[Cell]] = [
        [
            number(row["step"]),
            number(row.get("epoch")),
            estimate(row, "acceptance_length"),
            *(number(row.get("by_component", {}).get(name), 2) for name in components),
            "kept" if row["step"] == kept_step else "",
        ]
        for row in evals
    ]
    return Table(
        "Acceptance length on validation conversations; the checkpoint with the longest is kept.",
        [
            Column("step", numeric=True),
            Column("epoch", numeric=True),
            Column("mix", numeric=True, group="acceptance length"),
            *(Column(name, numeric=True, group="acceptance length") for name in components),
            Column("checkpoint"),
        ],
        rows,
    )


def data(prompts: Record, generate: Record) -> Section:
    """Where the conversations come from, which were kept, and what the target answered."""
    counts = ["num_kept", "num_passed_over", "num_duplicates", "num_rejected", "num_prompt_tokens"]
    titles = ["kept", "passed over", "duplicates", "rejected", "prompt tokens"]
    kept: list[list[Cell]] = [
        [
            *(str(row.get(key, "")) for key in ("component", "source", "split", "licence")),
            *(number(row.get(key)) for key in counts),
            share(row.get("assistant_share")),
            "; ".join(f"{why}: {n:,}" for why, n in row.get("reasons", {}).items()),
        ]
        for row in prompts["rows"]
    ]
    answers: list[list[Cell]] = [
        [
            row["component"],
            row["split"],
            *(number(row.get(key)) for key in ("num_answers", "num_looped", "num_tokens")),
        ]
        for row in generate.get("rows", [])
    ]
    blocks: list[Block] = [
        Table(
            "Conversations by source. Passed over: longer or shorter than asked for. Rejected: "
            "could not be rendered, for the reasons given.",
            [
                *(Column(title) for title in ("component", "source", "split", "licence")),
                *(Column(title, numeric=True) for title in [*titles, "assistant share"]),
                Column("reasons"),
            ],
            kept,
        )
    ]
    if answers:
        ends = ", ".join(f"{k} {n:,}" for k, n in generate.get("finish_reasons", {}).items())
        mean = number(generate.get("mean_answer_tokens"), 1)
        blocks.append(
            Table(
                f"The target's own answers; {mean} tokens each on average. How they end: "
                f"{ends or NOT_MEASURED}.",
                [
                    Column("component"),
                    Column("split"),
                    *(Column(title, numeric=True) for title in ("answers", "looped", "tokens")),
                ],
                answers,
            )
        )
    return Section("Data and licences", blocks)


def throughput(stages: dict[str, Record | None]) -> Section:
    """How fast each stage ran, beside what a bare matmul reaches on the same machine."""
    rows: list[list[Cell]] = []
    for name, record in stages.items():
        if record is None:
            rows.append([name, "inside training", *[DASH] * 5])
            continue
        achieved, matmul = record.get("achieved_gflops"), record.get("matmul_gflops")
        rows.append(
            [
                name,
                number(record.get("num_timed_tokens")),
                duration(record.get("seconds")),
                number(record.get("tokens_per_second"), 1),
                number(achieved, 1),
                number(matmul, 1),
                share(achieved / matmul if achieved is not None and matmul else None),
            ]
        )
    titles = ["tokens", "time", "tokens/s", "GFLOP/s", "GFLOP/s of a matmul", "share"]
    blocks: list[Block] = [
        Table(
            "Each stage timed once, without an interval.",
            [Column("stage"), *(Column(title, numeric=True) for title in titles)],
            rows,
        )
    ]
    store = stages.get("extract")
    if store is not None:
        layers = ", ".join(str(i) for i in store.get("aux_layers", [])) or NOT_MEASURED
        blocks.append(
            Text(
                f"The store holds {number(store.get('num_documents'))} conversations at "
                f"{number(store.get('bytes_per_token'))} bytes a token in "
                f"{store.get('dtype', 'an unnamed dtype')}, from aux layers {layers}; "
                f"{number(store.get('num_kept_tokens'))} of its {number(store.get('num_tokens'))} "
                "tokens were there when extraction began: kept while the answers were generated, "
                "or by an earlier run."
            )
        )
    return Section("Throughput of the stages", blocks)


def export(parity: list[Record], manifest: Record) -> Section:
    """What each engine drafts from the exported folder, against the trained head."""
    rows: list[list[Cell]] = [
        [
            row["engine"],
            number(row.get("num_drafted_tokens")),
            share(row.get("drafted_tokens_equal")),
            NOT_MEASURED
            if row.get("max_logit_difference") is None
            else f"{row['max_logit_difference']:.1e} of {row.get('max_logit', 0):.1f}",
        ]
        for row in parity
    ]
    blocks: list[Block] = [
        Table(
            "Each folder, read under its engine's rules, drafts beside the trained head, from "
            "every token of held-out conversations.",
            [
                Column("engine"),
                Column("drafted tokens", numeric=True),
                Column("the same", numeric=True),
                Column("largest difference of logits, of the largest", numeric=True),
            ],
            rows,
        )
    ]
    left_out = manifest.get("refused", {})
    if left_out:
        reasons: list[list[Cell]] = [[engine, reason] for engine, reason in left_out.items()]
        what = "Engines that cannot serve this head, and what would have to be otherwise."
        blocks.append(Table(what, [Column("engine"), Column("reason")], reasons))
    if manifest:
        blocks.append(_json("Manifest", manifest))
    return Section("Export", blocks)


def provenance(record: Record) -> Section:
    """What it takes to make the same head again."""
    facts: list[list[Cell]] = [
        [key, str(record.get(key, NOT_MEASURED))] for key in ("command", "seed", "git")
    ]
    facts += [[f"target {key}", _plain(value)] for key, value in record.get("target", {}).items()]
    mix: list[list[Cell]] = [
        [c["name"], f"{c['weight']:g}", ", ".join(c["sources"]), f"{c['temperature']:g}"]
        for c in record.get("profile", {}).get("components", [])
    ]
    keys: list[list[Cell]] = [[k, str(v)] for k, v in record.get("keys", {}).items()]
    versions: list[list[Cell]] = [[k, str(v)] for k, v in record.get("versions", {}).items()]
    columns = [Column("what"), Column("value")]
    return Section(
        "Provenance",
        [
            Table("The run.", columns, facts),
            Table(
                f"The traffic profile {record.get('profile', {}).get('name', '')}.",
                [
                    Column("component"),
                    Column("weight", numeric=True),
                    Column("sources"),
                    Column("temperature", numeric=True),
                ],
                mix,
            ),
            Table("The artifacts.", [Column("stage"), Column("key")], keys),
            Table("The packages.", [Column("package"), Column("version")], versions),
            _json("The whole configuration", record.get("config", {})),
        ],
    )


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json(title: str, record: Record) -> Code:
    return Code(title, json.dumps(record, indent=2, ensure_ascii=False))
