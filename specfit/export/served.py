"""What a translation is told of the target, and how translations look from outside."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specfit.draft_vocab import DraftVocab
from specfit.export.twins import Twin
from specfit.speculators.eagle3 import Eagle3, Eagle3Config
from specfit.targets.info import TargetInfo


@dataclass(frozen=True)
class Served:
    """The target that a head is exported for."""

    info: TargetInfo
    gguf: Path | None = None  # its file for llama.cpp


class Translator(Protocol):
    """A module of this package: one engine's files and rules."""

    def refusal(self, config: Eagle3Config, served: Served) -> str | None:
        """Why the engine cannot serve such a head, and what would; None: it can."""

    def write(self, folder: Path, head: Eagle3, vocab: DraftVocab, served: Served) -> None:
        """Writes the engine's files; the folder exists."""

    def twin(self, folder: Path, served: Served) -> Twin:
        """What the engine makes of a folder.

        Raises:
            ValueError: the engine would not load it; the message names the file.
        """

    def serving(self, served: Served, num_draft_tokens: int) -> str:
        """SERVE.md."""


def serve_text(command: str, tried: str, names: str) -> str:
    """Three lines: the command, with what it was tried, and what its names stand for."""
    return f"    {command}\n\n{tried}\n\n{names}\n"


def needs(flags: dict[str, bool], engine: str) -> str | None:
    """Why an engine that lacks some flags refuses a head: the first of `flags` that is set."""
    for name, value in flags.items():
        if value:
            return (
                f"speculator.{name} must be false for {engine}, which does not know it, got true; "
                "speculator=portable is served everywhere"
            )
    return None
