"""`profile`: the traffic drawn, and what of it the sources can and cannot cover."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from specfit.artifacts import Artifact
from specfit.files import write_json
from specfit.report import traffic
from specfit.traffic.config import ProfileConfig
from specfit.traffic.draw import Session, draw_sessions
from specfit.traffic.matching import SHARES
from specfit.traffic.mixture import token_shares
from specfit.traffic.profile_files import to_json

VERSION = 1
FIGURES = "profile.json"
NUM_SESSIONS = 4000  # drawn
# From a length that is wanted, beyond which it is not covered; of a count, a share of it.
MAX_DISTANCE = 0.2
log = logging.getLogger(__name__)


def run(
    folder: Path,
    *,
    profile: ProfileConfig,
    seed: int,
    prompts: Artifact,
    logs: dict[str, Any] | None,
) -> None:
    """Writes profile.json (which `drift` reads, too) and a page.

    Args:
        folder: of the artifact.
        profile: the traffic.
        seed: of what is drawn.
        prompts: what the sources gave.
        logs: how the profile was fitted to a log; None where it was not.
    """
    record = json.loads(prompts.file("prompts.json").read_text())
    drawable = all(
        c.prompt_tokens is not None and c.output_tokens is not None for c in profile.components
    )
    sessions = draw_sessions(profile, NUM_SESSIONS, seed) if drawable else []
    coverage = [_covered(row) for row in record["lengths"]]
    tokens = token_shares(profile)
    figures = {
        "profile": to_json(profile),
        "rows": [
            {
                "component": c.name,
                "requests": c.weight,
                "output_tokens": tokens[c.name],
                "sources": list(c.sources),
                "temperature": c.temperature,
            }
            for c in profile.components
        ],
        "drawn": [_drawn(c.name, sessions) for c in profile.components] if sessions else [],
        "arrivals": _arrivals(sessions),
        "coverage": coverage,
        "arrival": {k: getattr(v, "name", v) for k, v in asdict(profile.arrival).items()},
        "slo": asdict(profile.slo),
        "scale": profile.scale,
        "max_turns": profile.max_turns,
        "logs": logs,
    }
    write_json(folder / FIGURES, figures)
    traffic.write_page(folder, figures, sessions)
    for row in coverage:
        if row["covered"] is False and row["split"] == "test":
            log.warning(
                "profile: the sources of %s do not cover its %s: median %.0f wanted, %.0f there",
                *(row["component"], row["quantity"], row["wanted"][1], row["got"][1]),
            )


def _covered(row: Mapping[str, Any]) -> dict[str, Any]:
    """Whether what was taken is near enough to what is wanted; None where nothing is wanted."""
    if row["wanted"] is None:
        covered = None
    elif row["distance"] is not None:
        covered = row["distance"] <= MAX_DISTANCE
    else:
        # Counts: the quantiles are to be the same, as far as an interpolated one can be.
        pairs = zip(row["got"], row["wanted"], strict=True)
        covered = all(abs(g - w) <= max(0.5, MAX_DISTANCE * w) for g, w in pairs)
    return {**row, "covered": covered}


def _drawn(component: str, sessions: Sequence[Session]) -> dict[str, Any]:
    """Quantiles of what a component's sessions came to be, at SHARES."""
    own = [s for s in sessions if s.component == component]
    turns = [turn for s in own for turn in s.turns]
    later = [turn for s in own for turn in s.turns[1:]]
    prompts = [length for s in own for length in s.prompts()]
    return {
        "component": component,
        "num_sessions": len(own),
        "num_requests": len(turns),
        "prompt_tokens": _quantiles(prompts),
        "new_tokens": _quantiles([turn.new_tokens for turn in later]),
        "output_tokens": _quantiles([turn.output_tokens for turn in turns]),
        "turns": _quantiles([len(s.turns) for s in own]),
        "prefix_hit": _prefix_hit(own),
    }


def _prefix_hit(sessions: Sequence[Session]) -> float | None:
    """Share of the prompts' tokens that an unbounded prefix cache would hold already."""
    total = cached = 0
    for number, session in enumerate(sessions):
        new = sum(turn.new_tokens for turn in session.turns)
        total += sum(session.prompts())
        cached += sum(session.prompts()) - new - (session.prefix_tokens if number == 0 else 0)
        # An answer is in the cache, too: its tokens come back in the next prompt.
    return cached / total if total else None


def _quantiles(values: Sequence[int]) -> list[float] | None:
    return [float(x) for x in np.quantile(values, SHARES)] if values else None


def _arrivals(sessions: Sequence[Session]) -> dict[str, float] | None:
    """Rate and cv of the sessions that were drawn."""
    times = [s.start_seconds for s in sessions]
    if len(times) < 2 or times[-1] == times[0]:
        return None
    intervals = np.diff(times)
    return {
        "rate_per_second": float(1 / intervals.mean()),
        "cv": float(intervals.std() / intervals.mean()),
    }
