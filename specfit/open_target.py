"""The target in memory: as it comes, and as it is served."""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import torch

from specfit.artifacts import Artifact
from specfit.config import RunConfig
from specfit.engine import DecodeEngine, decode_engine
from specfit.stages import quantize
from specfit.targets.info import TargetInfo, read_info_file
from specfit.targets.load import checkpoint_folder, open_target
from specfit.targets.locate import Location
from specfit.targets.target import Target


class OpenTarget:
    """Opens the target, each form of it once.

    `target` and `quantize` give the artifacts that hold it as it comes and, where a budget asks for
    it, quantized; they are asked when they are needed.
    """

    def __init__(
        self,
        cfg: RunConfig,
        location: Location,
        device: torch.device,
        *,
        target: Callable[[], Artifact],
        quantize: Callable[[], Artifact],
    ) -> None:
        self._cfg, self._location, self._device = cfg, location, device
        self._target, self._quantize = target, quantize

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
            self._target(),
            self._cfg.target,
            self._location,
            self._device,
        )

    @property
    def served(self) -> Artifact:
        """What holds the target that speculation is fitted to."""
        return self._target() if self._cfg.quantize.budget is None else self._quantize()

    @cached_property
    def loaded(self) -> Target:
        """That target in memory."""
        return self.plain if self.served is self._target() else self.open_served()

    @property
    def open_served(self) -> Callable[[], Target]:
        if self.served is self._target():
            return self._open_plain
        return partial(quantize.open_quantized, self.served, self._device)

    @property
    def plain_engine(self) -> DecodeEngine:
        """Decodes the target as it comes. Its packed weights last as long as the stage does."""
        return decode_engine(self._cfg.runtime.engine, self.plain, self.plain_folder)

    @property
    def engine(self) -> DecodeEngine:
        """Decodes the target that speculation is fitted to."""
        return decode_engine(self._cfg.runtime.engine, self.loaded, self.served_folder)

    @property
    def served_folder(self) -> Path:
        """Of that target's checkpoint."""
        if self.served is self._target():
            return self.plain_folder
        return self.served.folder() / quantize.MODEL

    @property
    def plain_folder(self) -> Path:
        """Of the checkpoint as it comes."""
        return checkpoint_folder(self._target(), self._location)

    def close_plain(self) -> None:
        """Lets go of the target as it comes: nobody needs both in memory."""
        self.__dict__.pop("plain", None)
