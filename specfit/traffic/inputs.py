"""Profiles from wherever they are: by name, in files, from releases and from logs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from specfit.traffic import classifier
from specfit.traffic.config import ProfileConfig
from specfit.traffic.fingerprint import KIND, fingerprint_profile
from specfit.traffic.fitting import Fitted, fit_profile
from specfit.traffic.logs import read_log
from specfit.traffic.profile_files import from_json, named_profile, read_profile
from specfit_data.conversations import Conversation
from specfit_data.sources import Source, read

MAX_TEXTS = 2000  # of a source that the classifier is shown


@dataclass(frozen=True)
class Single:
    """Stands for a classifier where there is one component."""

    components: list[str]

    @property
    def confusion(self) -> Float[np.ndarray, "1 1"]:
        """There is nothing to mistake it for."""
        return np.ones((1, 1))

    def component(self, text: str, has_tools: bool) -> str:  # noqa: ARG002
        """That one."""
        return self.components[0]


@dataclass(frozen=True)
class TrafficInputs:
    """What turns logs and releases into profiles: the components that they may be of."""

    base: ProfileConfig
    sources: Mapping[str, Source]
    seed: int
    conf: Path  # the folder of the configuration
    count_tokens: Callable[[str], int]

    def named(self, what: str, key: str) -> ProfileConfig:
        """A profile by its name, a profile's file, a fingerprint's release, or a log.

        Raises:
            FileNotFoundError: it is neither.
            ValueError: the file is broken; the message names it.
        """
        path = Path(what).expanduser()
        if not path.is_file():
            if path.suffix:
                raise FileNotFoundError(f"{key} must be a profile's name or a file, got {what}")
            return named_profile(what, self.conf, key)
        if path.suffix == ".json":
            found = _record(path)
            if found.get("kind") == KIND:
                return self.of_fingerprint(path)
            # `profile` and `from_logs` write it beside what else they know.
            return from_json(found.get("profile", found), str(path))
        if path.suffix in (".yaml", ".yml"):
            return read_profile(path)
        return self.of_log(path).profile

    def of_fingerprint(self, path: Path) -> ProfileConfig:
        """The base with what a release says.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no release, or of other components.
        """
        if not path.is_file():
            raise FileNotFoundError(f"profile.from_fingerprint must be a file, no {path}")
        return fingerprint_profile(_record(path), self.base)

    def of_log(self, path: Path) -> Fitted:
        """The base with what a log says; raises as `read_log` and `fit_profile`."""
        several = len(self.base.components) > 1
        return fit_profile(
            read_log(path, self.count_tokens),
            self.base,
            self.classifier if several else None,
            where=str(path),
            seed=self.seed,
        )

    @cached_property
    def classifier(self) -> classifier.Classifier | Single:
        """Tells the base's components apart by their first user messages, with or without tools.

        Raises:
            ValueError: a component's sources have too few texts.
        """
        names = [c.name for c in self.base.components]
        if len(names) == 1:
            return Single(names)
        texts = {
            c.name: [text for source in c.sources for text in self._texts(source)]
            for c in self.base.components
        }
        return classifier.train(texts, self.seed)

    def _texts(self, name: str) -> list[tuple[str, bool]]:
        if name not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise ValueError(f"profile.components[].sources must be in {known}, got {name}")
        found = islice(read(name, self.sources[name]), MAX_TEXTS)
        return [
            (next(m.content for m in row.messages if m.role == "user"), bool(row.tools))
            for row in found
            if isinstance(row, Conversation)
        ]


def _record(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno} must be JSON: {error.msg}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got a {type(found).__name__}")
    return found
