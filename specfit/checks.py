"""Checks of what a user configures, and of what was made."""

from typing import Any

MISSING: Any = "???"  # what a user must give: omegaconf's mark, for files that do not import it


class GateRejected(ValueError):  # noqa: N818
    """What was made is not good enough; it is kept."""


def require(holds: bool, key: str, requirement: str, value: object) -> None:
    """Raises ValueError, naming the key, what it must be and what it is, unless `holds`."""
    if not holds:
        raise ValueError(f"{key} must {requirement}, got {value}")


def require_positive(config: object, group: str, *names: str) -> None:
    """Raises ValueError unless each of these counts of a `group` is at least 1."""
    for name in names:
        value = getattr(config, name)
        require(value >= 1, f"{group}.{name}", "be at least 1", value)
