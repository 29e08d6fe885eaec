"""What a report says, apart from how it is set: `page` and `markdown` each render these blocks."""

from dataclasses import dataclass

from specfit.report.figures import Estimate

Cell = str | Estimate


@dataclass(frozen=True)
class Text:
    """One paragraph."""

    text: str


@dataclass(frozen=True)
class Tile:
    """One answer, large, with what it is measured against below it, a line each."""

    label: str
    value: Cell
    details: list[str]


@dataclass(frozen=True)
class Tiles:
    """The answers that a reader came for."""

    tiles: list[Tile]


@dataclass(frozen=True)
class Column:
    """One column; neighbours of the same `group` share a heading above theirs."""

    title: str
    numeric: bool = False
    group: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first column names the row."""

    caption: str
    columns: list[Column]
    rows: list[list[Cell]]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.caption


@dataclass(frozen=True)
class Image:
    """A PNG beside the page; `alt` says in words what it shows."""

    name: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Code:
    """Verbatim text, folded away where that is possible."""

    title: str
    text: str


@dataclass(frozen=True)
class Definitions:
    """Terms, a sentence each."""

    terms: dict[str, str]


Block = Text | Tiles | Table | Image | Code | Definitions


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """A report: what a reader sees first, then sections."""

    title: str
    lead: str  # what was fitted to what, in one sentence
    opening: list[Block]
    sections: list[Section]
