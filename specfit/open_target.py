"""The target in memory: as it comes, and as it is served."""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch

from specfit.artifacts import Artifact
from specfit.config import RunConfig
from specfit.engine import DecodeEngine, decode_engine
from specfit.stages import quantize
from specfit.targets.info import TargetInfo, read_info_file
from specfit.targets.load import checkpoint_folder, open_target
from specfit.targets.locate import Location
from specfit.targets.target import Target


class Checkpoints(Protocol):
    """What has the target: the path."""

    cfg: RunConfig
    location: Location
    device: torch.device

    @property
    def target(self) -> Artifact:
        """As it comes."""

    @property
    def quantize(self) -> Artifact:
        """Quantized, where a budget asks for it."""


class OpenTarget:
    """Opens the target, each form of it once."""

    def __init__(self, path: Checkpoints) -> None:
        self._path = path

    @cached_property
    def info(self) -> TargetInfo:
        return read_info_file(self.served.file("info.json"))

    @cached_property
    def plain(self) -> Target:
        """The target as it comes, in memory: loaded by the first stage that needs it."""
        return self._open_plain()

    @property
    def _open_plain(self) -> Callable[[], Target]:
        return partial(
            open_target,
            self._path.target,
            self._path.cfg.target,
            self._path.location,
            self._path.device,
        )

    @property
    def served(self) -> Artifact:
        """What holds the target that speculation is fitted to."""
        return self._path.target if self._path.cfg.quantize.budget is None else self._path.quantize

    @cached_property
    def loaded(self) -> Target:
        """That target in memory."""
        return self.plain if self.served is self._path.target else self.open_served()

    @property
    def open_served(self) -> Callable[[], Target]:
        if self.served is self._path.target:
            return self._open_plain
        return partial(quantize.open_quantized, self.served, self._path.device)

    @property
    def plain_engine(self) -> DecodeEngine:
        """Decodes the target as it comes. Its packed weights last as long as the stage does."""
        return decode_engine(self._path.cfg.runtime.engine, self.plain, self.plain_folder)

    @property
    def engine(self) -> DecodeEngine:
        """Decodes the target that speculation is fitted to."""
        return decode_engine(self._path.cfg.runtime.engine, self.loaded, self.served_folder)

    @property
    def served_folder(self) -> Path:
        """Of that target's checkpoint."""
        if self.served is self._path.target:
            return self.plain_folder
        return self.served.folder() / quantize.MODEL

    @property
    def plain_folder(self) -> Path:
        """Of the checkpoint as it comes."""
        return checkpoint_folder(self._path.target, self._path.location)

    def close_plain(self) -> None:
        """Lets go of the target as it comes: nobody needs both in memory."""
        self.__dict__.pop("plain", None)
