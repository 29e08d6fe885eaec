"""The Markdown twin of the page."""

from specfit.report.document import (
    Block,
    Code,
    Column,
    Definitions,
    Document,
    Image,
    Table,
    Text,
    Tile,
    Tiles,
)


def render(document: Document) -> str:
    """The document in GitHub's Markdown; images are linked by name."""
    parts = [f"# {_escape(document.title)}", _escape(document.lead)]
    parts += [_block(block) for block in document.opening]
    for section in document.sections:
        parts.append(f"## {_escape(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def table(columns: list[Column], rows: list[list[str]]) -> str:
    """A pipe table; a column's group is said before its title."""
    titles = [f"{c.group}, {c.title}" if c.group else c.title for c in columns]
    rule = ["---:" if c.numeric else "---" for c in columns]
    lines = [[_escape(title) for title in titles], rule]
    lines += [[_escape(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return _escape(text)
        case Tiles(tiles):
            return "\n".join(_tile(tile) for tile in tiles)
        case Table(caption, columns, rows):
            cells = [[str(cell) for cell in row] for row in rows]
            return f"{_escape(caption)}\n\n{table(columns, cells)}"
        case Image(name, alt, caption):
            return f"![{_escape(alt)}]({name})\n\n{_escape(caption)}"
        case Code(title, text):
            longest = max((len(run) for run in _backticks(text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{_escape(title)}:\n\n{fence}\n{text}\n{fence}"
        case Definitions(terms):
            return "\n".join(f"- **{_escape(t)}**: {_escape(d)}" for t, d in terms.items())


def _tile(tile: Tile) -> str:
    details = _escape("; ".join(tile.details))
    return f"- **{_escape(tile.label)}: {_escape(str(tile.value))}.** {details}"


def _backticks(text: str) -> list[str]:
    return "".join(c if c == "`" else " " for c in text).split()


def _escape(text: str) -> str:
    for special in "\\|*`[]<":
        text = text.replace(special, "\\" + special)
    return " ".join(text.split())
