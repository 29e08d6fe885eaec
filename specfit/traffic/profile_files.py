"""Profiles as files: JSON or YAML of the dataclass, and nothing that it does not know.

A YAML file may have the defaults list that conf/profile uses: `defaults: [OTHER, _self_]` begins
with the file OTHER.yaml beside it, as Hydra does: mappings are merged, all else is replaced.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from specfit.checks import MISSING
from specfit.traffic.config import ProfileConfig


def to_json(profile: ProfileConfig) -> dict[str, Any]:
    """The profile as JSON values, enums by their names; `from_json` makes it again."""

    def named(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value.name if isinstance(value, Enum) else value for key, value in items}

    return asdict(profile, dict_factory=named)


def from_json(values: object, where: str) -> ProfileConfig:
    """The profile that `values` describe.

    Args:
        values: what a JSON or YAML file holds.
        where: the file, for messages.

    Raises:
        ValueError: a key is unknown or missing, or a value is not what it must be; the message
            names `where` and the key.
    """
    try:
        profile = _built(ProfileConfig, values, "profile")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    assert isinstance(profile, ProfileConfig)
    return profile


def read_profile(path: Path) -> ProfileConfig:
    """The profile in a .json, .yaml or .yml file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no profile; the message names the file and the key or the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"a profile must be a file, no {path}")
    match path.suffix:
        case ".json":
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{error.lineno} must be JSON: {error.msg}") from error
        case ".yaml" | ".yml":
            values = _composed(path)
        case _:
            raise ValueError(f"a profile's file must end in .json, .yaml or .yml, got {path}")
    return from_json(values, str(path))


def named_profile(name: str, conf_folder: Path, key: str = "a profile") -> ProfileConfig:
    """The profile that `conf_folder`/profile has by this name; `key` is what asks for it.

    Raises:
        FileNotFoundError: it has none; the message lists those that it has.
        ValueError: see `read_profile`.
    """
    known = {path.stem: path for path in sorted((conf_folder / "profile").glob("*.yaml"))}
    if name not in known:
        raise FileNotFoundError(f"{key} must be one of {', '.join(known)}, or a file, got {name}")
    return read_profile(known[name])


def _composed(path: Path) -> Any:
    """What a YAML file holds, on top of the files in its defaults list."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML: {error}") from error
    if not isinstance(values, dict) or "defaults" not in values:
        return values
    defaults = values.pop("defaults")
    listed = isinstance(defaults, list) and defaults[-1:] == ["_self_"]
    known = listed and all((path.parent / f"{name}.yaml").is_file() for name in defaults[:-1])
    if not known:
        raise ValueError(f"{path}: defaults must be files beside it, then _self_, got {defaults}")
    composed: Any = {}
    for name in defaults[:-1]:
        composed = _merged(composed, _composed(path.parent / f"{name}.yaml"))
    return _merged(composed, values)


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


def _built(kind: Any, value: object, key: str) -> object:
    """`value` as a `kind`: a dataclass, a list, an enum, a number, a text, or null."""
    if get_origin(kind) is UnionType:
        [some] = [arg for arg in get_args(kind) if arg is not NoneType]
        return None if value is None else _built(some, value, key)
    if get_origin(kind) is list:
        _require(isinstance(value, list), key, "a list", value)
        assert isinstance(value, list)
        [item] = get_args(kind)
        return [_built(item, v, f"{key}[{i}]") for i, v in enumerate(value)]
    if is_dataclass(kind):
        return _built_dataclass(kind, value, key)
    if issubclass(kind, Enum):
        named = isinstance(value, str) and value in kind.__members__
        _require(named, key, f"one of {', '.join(kind.__members__)}", value)
        return kind[str(value)]
    # A bool is an int to Python, and no number to whoever writes a profile.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        _require(number, key, "a number", value)
        assert isinstance(value, int | float)
        return float(value)
    if kind is int:
        _require(number and isinstance(value, int), key, "a whole number", value)
        return value
    assert kind is str
    _require(isinstance(value, str), key, "a text", value)
    return value


def _built_dataclass(kind: Any, value: object, key: str) -> object:
    _require(isinstance(value, Mapping), key, "a mapping", value)
    assert isinstance(value, Mapping)
    hints = get_type_hints(kind)
    for name in value:
        _require(name in hints, f"{key}.{name}", f"a key of {', '.join(hints)}", "an unknown one")
    for f in fields(kind):
        needed = f.default == MISSING or (
            f.default is NO_DEFAULT and f.default_factory is NO_DEFAULT
        )
        _require(f.name in value or not needed, f"{key}.{f.name}", "given", "nothing")
    built = {name: _built(hints[name], v, f"{key}.{name}") for name, v in value.items()}
    return kind(**built)


def _require(holds: bool, key: str, what: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{key} must be {what}, got {value}")
