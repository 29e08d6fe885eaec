"""What `measure` found, and the setting that a report opens with."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from specfit.report.figures import Estimate, Number, compare, estimate, ratio

PLAIN = "none"
NGRAM = "ngram"
MIX = "all"  # the component that stands for all, weighted as the profile says

Row = Mapping[str, Any]


class Traffic(NamedTuple):
    """Requests of one kind; without a temperature, each component is served at its own."""

    component: str
    temperature: Number | None

    @property
    def temperature_text(self) -> str:
        """The temperature as a table says it."""
        return "own" if self.temperature is None else f"{self.temperature:g}"


@dataclass(frozen=True)
class Acceptance:
    """The rows of `acceptance.json`, and the answers where a proposer left plain decoding."""

    rows: list[Row]
    differences: list[Row]
    heads: list[Row]  # the fitted head in place of each other one, on the same prompts
    confidence: Number | None
    device: str | None
    num_threads: int | None
    engine: str | None  # torch: transformers ran the target; fp4: our kernels

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Acceptance":
        """What the contents of `acceptance.json` say.

        Raises:
            ValueError: no row is of a draft model.
        """
        if all(row["proposer"] in (PLAIN, NGRAM) for row in record["rows"]):
            raise ValueError("acceptance.json must hold a row of a draft model, got none")
        return cls(
            record["rows"],
            record.get("differences", []),
            record.get("heads", []),
            record.get("confidence"),
            record.get("device"),
            record.get("num_threads"),
            record.get("engine"),
        )

    @cached_property
    def proposers(self) -> list[str]:
        """Draft models first, plain decoding last."""
        names = dict.fromkeys(row["proposer"] for row in self.rows)
        return sorted(names, key=lambda name: (name == PLAIN, name == NGRAM))

    @property
    def head(self) -> str:
        """The draft model that was fitted."""
        return self.proposers[0]

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Every kind of request measured: the mix first, each from cold to hot."""
        kinds = dict.fromkeys(Traffic(row["component"], row["temperature"]) for row in self.rows)
        order = {component: i for i, component in enumerate(dict.fromkeys(t[0] for t in kinds))}
        return sorted(kinds, key=lambda t: (t[0] != MIX, order[t[0]], _heat(t.temperature)))

    @cached_property
    def ordered(self) -> list[Row]:
        """All rows, by kind of traffic, then proposer, then k."""
        return sorted(
            self.rows,
            key=lambda row: (
                self.traffic.index(Traffic(row["component"], row["temperature"])),
                self.proposers.index(row["proposer"]),
                row["num_draft_tokens"],
            ),
        )

    @cached_property
    def num_draft_tokens(self) -> int:
        """The k of the opening: of those measured, the one with most tokens/s on the mix."""
        rows = [r for r in self.rows if r["proposer"] == self.head and _is_of(r, self.traffic[0])]
        rows = rows or [r for r in self.rows if r["proposer"] == self.head]
        best = max(rows, key=lambda row: row.get("tokens_per_second") or -math.inf)
        return int(best["num_draft_tokens"])

    def row(self, proposer: str, traffic: Traffic) -> Row | None:
        """The row of `proposer` at the opening's k; plain decoding has no k."""
        for row in self.rows:
            at_k = proposer == PLAIN or row["num_draft_tokens"] == self.num_draft_tokens
            if row["proposer"] == proposer and _is_of(row, traffic) and at_k:
                return row
        return None

    def length(self, proposer: str, traffic: Traffic) -> Estimate:
        """Acceptance length at the opening's k."""
        return estimate(self.row(proposer, traffic), "acceptance_length")

    def speed(self, proposer: str, traffic: Traffic) -> Estimate:
        """Tokens/s at the opening's k."""
        return estimate(self.row(proposer, traffic), "tokens_per_second", digits=1)

    def speed_up(self, row: Row) -> Estimate:
        """Tokens/s of a row over those of plain decoding on the same traffic."""
        plain = self.row(PLAIN, Traffic(row["component"], row["temperature"]))
        return ratio(estimate(row, "tokens_per_second"), estimate(plain, "tokens_per_second"))

    def fastest(self, traffic: Traffic) -> tuple[str, list[str]] | None:
        """The proposer with most tokens/s, and those whose intervals meet its own."""
        speeds = {name: self.speed(name, traffic) for name in self.proposers}
        known = {name: speed for name, speed in speeds.items() if speed.value is not None}
        if not known:
            return None
        best = max(known, key=lambda name: known[name].value or 0.0)
        rivals = [n for n in known if n != best and compare(known[best], known[n]) != 1]
        return best, rivals

    def equal_plain(self) -> bool | None:
        """Whether every greedy answer of the head is plain decoding's, at every k."""
        checks = [r.get("outputs_equal_plain") for r in self.rows if r["proposer"] == self.head]
        made = [check for check in checks if check is not None]
        return all(made) if made else None


def _heat(temperature: Number | None) -> float:
    return math.inf if temperature is None else float(temperature)


def _is_of(row: Row, traffic: Traffic) -> bool:
    return (row["component"], row["temperature"]) == traffic
