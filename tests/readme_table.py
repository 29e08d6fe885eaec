"""Prints the README's table of results from a report: `make table`.

Usage: readme_table.py REPORT_FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = "| traffic | proposer | acceptance length, k = {k} | tokens/s | equal to plain |"


def table(report: dict[str, Any]) -> str:
    """Markdown: one row a component and proposer, figures with their intervals."""
    rows = report["acceptance"]["rows"]
    k = max(row["num_draft_tokens"] for row in rows)
    lines = [COLUMNS.format(k=k), "|---|---|---|---|---|"]
    lines += [_line(row) for row in rows if row["component"] != "all"]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    length = _figure(row, "acceptance_length", 2) if row["proposer"] != "none" else "1"
    equal = {True: "yes", False: "no", None: "-"}[row["outputs_equal_plain"]]
    cells = [row["component"], row["proposer"], length, _figure(row, "tokens_per_second", 1), equal]
    return f"| {' | '.join(cells)} |"


def _figure(row: dict[str, Any], key: str, digits: int) -> str:
    if row.get(key) is None:
        return "not measured"
    value = f"{row[key]:.{digits}f}"
    if row.get(f"{key}_low") is None:
        return f"{value} (no interval)"
    return f"{value} ({row[f'{key}_low']:.{digits}f} to {row[f'{key}_high']:.{digits}f})"


if __name__ == "__main__":
    report = json.loads((Path(sys.argv[1]) / "report.json").read_text())
    sys.stdout.write(table(report) + "\n")
