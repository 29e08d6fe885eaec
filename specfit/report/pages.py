"""Writes a document as the page and its Markdown twin."""

from pathlib import Path

from specfit.report import markdown, page
from specfit.report.document import Document


def write(folder: Path, name: str, document: Document) -> None:
    """NAME.html, with the images in `folder` inside it, and NAME.md beside them."""
    (folder / f"{name}.html").write_text(page.render(document, folder), encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown.render(document), encoding="utf-8")
