"""Figures as a reader meets them: a value and its interval, or the words "not measured"."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"
DASH = "\N{EN DASH}"  # between the ends of a range, and where a figure has no meaning

Number = int | float  # what JSON reads; checked annotations do not take an int for a float


@dataclass(frozen=True)
class Estimate:
    """A measured value between the ends of its interval; None where nothing was measured."""

    value: Number | None
    low: Number | None = None
    high: Number | None = None
    digits: int = 2  # after the decimal point

    @property
    def interval(self) -> str:
        """In parentheses; `(no interval)` beside a value without one, empty beside no value."""
        if self.value is None:
            return ""
        if self.low is None or self.high is None:
            return "(no interval)"
        low, high = number(self.low, self.digits), number(self.high, self.digits)
        return f"({low}{DASH}{high})"

    def __str__(self) -> str:
        return f"{number(self.value, self.digits)} {self.interval}".rstrip()


def estimate(row: Mapping[str, Any] | None, key: str, digits: int = 2) -> Estimate:
    """The figure `key` of `row`, with `<key>_low` and `<key>_high` as its interval."""
    if row is None:
        return Estimate(None, digits=digits)
    return Estimate(row.get(key), row.get(f"{key}_low"), row.get(f"{key}_high"), digits)


def ratio(over: Estimate, under: Estimate) -> Estimate:
    """`over` / `under`, between the ratios of opposite ends: wider than either's level asks."""
    if over.value is None or not under.value:
        return Estimate(None)
    if over.low is None or over.high is None or not under.low or not under.high:
        return Estimate(over.value / under.value)
    return Estimate(over.value / under.value, over.low / under.high, over.high / under.low)


def compare(a: Estimate, b: Estimate) -> int | None:
    """1 where `a` lies above `b`, -1 below, 0 where the intervals meet; None without both."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return None
    return (a.low > b.high) - (a.high < b.low)


def number(value: Number | None, digits: int = 0) -> str:
    """`value` with thousands separators and `digits` decimals."""
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}"


def count(num: int, noun: str) -> str:
    """`1 answer`, `2 answers`."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def share(value: Number | None) -> str:
    """A share of 1 in percent."""
    return NOT_MEASURED if value is None else f"{100 * value:.1f} %"


def percent_change(row: Mapping[str, Any], key: str) -> str:
    """A relative change with its interval, in percent, signs shown."""
    value, low, high = (100 * row[f"{key}{end}"] for end in ("", "_low", "_high"))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def duration(seconds: Number | None) -> str:
    """Seconds, in the largest unit that leaves at least two."""
    if seconds is None:
        return NOT_MEASURED
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def is_all(share: Number | None) -> bool | None:
    """Whether a share is the whole; None of one that was not measured."""
    return None if share is None else share == 1


def yes_no(value: bool | None) -> str:
    """A statement that was checked, or was not."""
    return NOT_MEASURED if value is None else "yes" if value else "no"
