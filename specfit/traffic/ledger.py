"""What was spent of a privacy budget: a file that does not forget."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from filelock import FileLock

from specfit.files import dumps, write_json

VERSION = 1


class BudgetSpent(ValueError):  # noqa: N818
    """A release would cost more than what is left; nothing was spent."""


@dataclass(frozen=True)
class Ledger:
    """Spends of epsilon, which add up to at most `budget` in any `period_days` in a row.

    A spend is on the disk before `spend` returns, and before what it pays for is drawn: a kill in
    between costs the spend and releases nothing. Processes take turns through a lock beside the
    file. The file holds a digest of all it says, so what was changed, removed or cut off by hand or
    by accident is found. Who can write the file can also compute digests, put an older copy back or
    delete it: only the releasing account should be able to.

    A spend dated in the future, of a clock that was turned back, counts until its period is over.
    """

    path: Path
    budget: float
    period_days: float

    def require(self, epsilon: float, now: datetime | None = None) -> None:
        """Refuses early what `spend` would refuse, and raises what it raises."""
        with self._locked() as record:
            self._require(record, epsilon, now or datetime.now(UTC))

    def spend(self, epsilon: float, window: str, now: datetime | None = None) -> float:
        """Records `epsilon` for good; returns what is left of the budget.

        Raises:
            BudgetSpent: less is left.
            ValueError: the file was truncated or altered, or is of another budget or period; the
                message names it.
        """
        now = now or datetime.now(UTC)
        with self._locked() as record:
            left = self._require(record, epsilon, now) - _exact(epsilon)
            spend = {"at": now.isoformat(), "epsilon": epsilon, "window": window}
            record["spends"].append(spend)
            write_json(self.path, record | {"digest": _digest(record)})
        return float(left)

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f"{self.path.name}.lock")):
            yield self._read() if self.path.exists() else self._opened()

    def _opened(self) -> dict[str, Any]:
        terms = {"version": VERSION, "budget": self.budget, "period_days": self.period_days}
        return terms | {"spends": []}

    def _read(self) -> dict[str, Any]:
        hint = "; restore it from a backup: without it nothing says what was spent"
        try:
            record: dict[str, Any] = json.loads(self.path.read_bytes())
            whole = record.pop("digest") == _digest(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} must be a whole ledger, got a broken one{hint}"
            ) from error
        if not whole:
            raise ValueError(f"{self.path} must be as it was written, got an altered one{hint}")
        if record["version"] != VERSION:
            found = record["version"]
            raise ValueError(f"{self.path} must be a ledger of version {VERSION}, got {found}")
        for name in ("budget", "period_days"):
            if record[name] != getattr(self, name):
                raise ValueError(
                    f"fingerprint.{name} must be {record[name]:g}, as {self.path} was begun with, "
                    f"got {getattr(self, name):g}"
                )
        return record

    def _require(self, record: dict[str, Any], epsilon: float, now: datetime) -> Fraction:
        since = now - timedelta(days=self.period_days)
        spends = [spend for spend in record["spends"] if _when(spend) > since]
        left = _exact(self.budget) - sum(_exact(spend["epsilon"]) for spend in spends)
        if _exact(epsilon) > left:
            raise BudgetSpent(
                f"fingerprint.epsilon must be at most {float(left):g}, which {self.path} has left "
                f"of {self.budget:g} for {self.period_days:g} days, got {epsilon:g}"
            )
        return left


def _exact(epsilon: float) -> Fraction:
    """The decimal number that was meant: ten times 0.1 is 1."""
    return Fraction(str(epsilon))


def _when(spend: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(spend["at"])


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(dumps(record).encode()).hexdigest()
