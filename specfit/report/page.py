"""The HTML page: one file, no script, nothing fetched."""

import base64
import re
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path

from specfit.report.document import (
    Block,
    Cell,
    Code,
    Column,
    Definitions,
    Document,
    Image,
    Section,
    Table,
    Text,
    Tiles,
)
from specfit.report.figures import NOT_MEASURED, Estimate


def render(document: Document, folder: Path) -> str:
    """The document as a self-contained page.

    Args:
        document: what the page says.
        folder: where its images lie; they are inlined.

    Raises:
        FileNotFoundError: an image is not in `folder`.
    """
    terms = {
        term
        for section in document.sections
        for block in section.blocks
        if isinstance(block, Definitions)
        for term in block.terms
    }
    opening = "\n".join(_block(block, folder, terms) for block in document.opening)
    sections = "\n".join(_section(section, folder, terms) for section in document.sections)
    css = resources.files("specfit.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(document.title)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{escape(document.title)}</h1>
<p class="lead">{escape(document.lead)}</p>
</header>
<main>
{opening}
{_contents(document.sections)}
{sections}
</main>
</body>
</html>
"""


def _contents(sections: list[Section]) -> str:
    if len(sections) < 2:
        return ""
    links = (f'<li><a href="#{_anchor(s.title)}">{escape(s.title)}</a></li>' for s in sections)
    return f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>'


def _section(section: Section, folder: Path, terms: set[str]) -> str:
    blocks = "\n".join(_block(block, folder, terms) for block in section.blocks)
    anchor = _anchor(section.title)
    return f'<section id="{anchor}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>'


def _block(block: Block, folder: Path, terms: set[str]) -> str:
    match block:
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Tiles(tiles):
            parts = "".join(
                f"<div><dt>{escape(t.label)}</dt>"
                f'<dd class="value">{_cell(t.value)}</dd>'
                f"<dd>{'<br>'.join(escape(line) for line in t.details)}</dd></div>"
                for t in tiles
            )
            return f'<dl class="tiles">{parts}</dl>'
        case Table():
            return _table(block, terms)
        case Image(name, alt, caption):
            data = base64.b64encode((folder / name).read_bytes()).decode("ascii")
            return (
                f'<figure><div role="region" tabindex="0" aria-label="{escape(caption)}">'
                f'<img src="data:image/png;base64,{data}" alt="{escape(alt)}"></div>'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        case Code(title, text):
            return (
                f"<details><summary>{escape(title)}</summary>"
                f'<pre tabindex="0">{escape(text)}</pre></details>'
            )
        case Definitions():
            parts = "".join(
                f'<dt id="{_anchor(t)}">{escape(t)}</dt><dd>{escape(d)}</dd>'
                for t, d in block.terms.items()
            )
            return f'<dl class="definitions">{parts}</dl>'


def _table(table: Table, terms: set[str]) -> str:
    head = _groups(table.columns, terms) if any(c.group for c in table.columns) else ""
    head += f"<tr>{''.join(_heading(c, terms) for c in table.columns)}</tr>"
    rows = []
    for first, *rest in table.rows:
        cells = [f'<th scope="row">{_cell(first)}</th>']
        for column, cell in zip(table.columns[1:], rest, strict=True):
            cells.append(f"<td{_alignment(column)}>{_cell(cell)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    caption = escape(table.caption)
    # What is too wide scrolls inside its own region, which a keyboard must be able to reach.
    return (
        f'<figure class="table"><figcaption>{caption}</figcaption>'
        f'<div role="region" tabindex="0" aria-label="{caption}"><table aria-label="{caption}">'
        f"<thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div></figure>"
    )


def _groups(columns: list[Column], terms: set[str]) -> str:
    cells = []
    for group, members in groupby(columns, key=lambda c: c.group):
        span = len(list(members))
        heading = f'<th colspan="{span}" scope="colgroup">{_term(group, terms)}</th>'
        cells.append(heading if group else f'<td colspan="{span}"></td>')
    return f'<tr class="groups">{"".join(cells)}</tr>'


def _heading(column: Column, terms: set[str]) -> str:
    return f'<th scope="col"{_alignment(column)}>{_term(column.title, terms)}</th>'


def _term(text: str, terms: set[str]) -> str:
    return f'<a href="#{_anchor(text)}">{escape(text)}</a>' if text in terms else escape(text)


def _alignment(column: Column) -> str:
    return ' class="numeric"' if column.numeric else ""


def _cell(cell: Cell) -> str:
    if isinstance(cell, Estimate) and cell.value is not None:
        value = str(cell).removesuffix(cell.interval)
        return f'{value}<span class="interval">{cell.interval}</span>'
    text = escape(str(cell))
    return f'<span class="missing">{text}</span>' if text == NOT_MEASURED else text


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
