"""A page that shows which tokens of a conversation are learned."""

import html
from collections.abc import Sequence

STYLE = """
body { font: 15px/1.7 ui-monospace, monospace; max-width: 100ch; margin: 2rem auto; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font: 600 1.2rem system-ui, sans-serif; }
p { font-family: system-ui, sans-serif; }
span { border-radius: 2px; box-shadow: inset 0 0 0 0.5px #8884; white-space: pre-wrap;
       overflow-wrap: anywhere; }
.learned { background: #bfe8c8; }
.given { background: #eee; color: #555; }
"""


def example_html(tokens: Sequence[str], learned: Sequence[bool], title: str) -> str:
    """A self-contained page: the text of each token in order, coloured by whether it is learned.

    Raises:
        ValueError: `tokens` and `learned` differ in length.
    """
    if len(tokens) != len(learned):
        raise ValueError(
            f"learned must have one flag a token, got {len(learned)} for {len(tokens)}"
        )
    body = "".join(_token(token, flag) for token, flag in zip(tokens, learned, strict=True))
    heading = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
        f"<style>{STYLE}</style></head><body><h1>{heading}</h1>"
        f'<p><span class="learned">learned</span> <span class="given">given</span> '
        f"{sum(learned)} of {len(tokens)} tokens are learned; · is a space, ⏎ a line end, → a tab."
        f"</p><div>{body}</div></body></html>\n"
    )


def _token(text: str, is_learned: bool) -> str:
    shown = html.escape(text).replace(" ", "·").replace("\t", "→")
    # A line end is shown where it is, and kept, so that the page has the lines of the text.
    shown = shown.replace("\r", "␍").replace("\n", "⏎<br>")
    return f'<span class="{"learned" if is_learned else "given"}">{shown}</span>'
