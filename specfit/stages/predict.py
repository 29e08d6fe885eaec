"""`predict`: what a token takes under the profile's traffic, by k and load, and the whole stack."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from specfit.artifacts import Artifact
from specfit.checks import require
from specfit.engine import DecodeEngine
from specfit.files import write_json
from specfit.prediction.check import check_rows
from specfit.prediction.config import HardwareConfig, ModelConfig, PredictConfig
from specfit.prediction.goodput import can_be_drawn, simulated_rows
from specfit.prediction.measured import Measured, measure, modelled
from specfit.prediction.model import (
    LatencyModel,
    Length,
    Load,
    Traffic,
    configured,
    described,
    mixed,
    prefill_share,
    slowdown,
)
from specfit.prediction.stack import stack_rows
from specfit.report import predicted
from specfit.targets.info import TargetInfo
from specfit.traffic.config import ComponentConfig, ProfileConfig
from specfit.traffic.draw import draw_sessions, mean
from specfit.training.checkpoints import load_head

VERSION = 2
FIGURES = "latency.json"
MIX = "all"  # as acceptance.json names it
LOOKUP = "ngram"  # drafts what stands in the context, without a pass of anything
SHARE_CHANGE = 0.1  # of the requests, in what a change of the mix costs
NUM_SESSIONS = 500  # that the mean prompt of a component with turns is taken over
log = logging.getLogger(__name__)
Row = dict[str, Any]


@dataclass(frozen=True)
class PredictJob:
    """What the stage works on."""

    folder: Path
    config: PredictConfig
    hardware: HardwareConfig
    profile: ProfileConfig
    acceptance: Sequence[Row] | None = None  # acceptance.json; None: `predict.acceptance`
    info: TargetInfo | None = None  # None: `predict.model`
    # Both where `hardware` has no values: the target to time, and the head that drafts.
    open_engine: Callable[[], DecodeEngine] | None = None
    speculator: Artifact | None = None
    seed: int = 0  # of the simulated traffic


def run(job: PredictJob) -> None:
    """Writes latency.json, and a page with its tables and plot.

    Raises:
        ValueError: the configuration leaves something open, or acceptance does not fit it.
    """
    components = [_traffic(job, c) for c in job.profile.components]
    weights = {c.name: c.weight for c in job.profile.components}
    traffic = components
    if len(components) > 1:
        traffic = [*components, mixed(components, weights, MIX)]
    description = _description(job)
    found = _measured(job, description) if job.hardware.measured else None
    model = found.model if found else configured(description, job.hardware)
    if job.config.proposer == LOOKUP:
        model = replace(model, draft_cost=0.0)
    rows = [row for t in traffic for row in _latency_rows(job.config, model, t)]
    rows += list(_best_rows(rows))
    if len(components) > 1:
        rows += list(_mix_rows(job.config, model, components, weights))
    if found:
        rows += list(_pass_rows(found))
        rows += list(check_rows(job.acceptance or [], model, job.config.proposer))
    if job.config.stack is None and can_be_drawn(job.profile):
        lengths = {t.name: [length.value for length in t.lengths] for t in components}
        rows += simulated_rows(job.config, job.profile, model, lengths, job.seed)
    if job.config.stack is not None:
        served = traffic[-1]
        hit_rate = job.config.hit_rate
        rows += stack_rows(job.config.stack, description, job.hardware, served, hit_rate)
    write_json(
        job.folder / FIGURES,
        {
            "rows": rows,
            "target": description.name,
            "target_source": description.source,
            "hardware": job.hardware.name,
            "num_devices": job.hardware.num_devices,
            "measured": found is not None,
            "proposer": job.config.proposer if job.acceptance else None,
            "acceptance_sources": sorted({a.source for a in job.config.acceptance or []}),
            "constants": _constants(job, found),
            "hit_rate": job.config.hit_rate,
            "disaggregated": job.config.disaggregated,
            "expected_source": job.config.stack.expected_source if job.config.stack else None,
            "stack_concurrency": job.config.stack.concurrency if job.config.stack else None,
        },
    )
    predicted.write_page(job.folder)
    for row in rows:
        if row["kind"] == "best" and row["component"] == traffic[-1].name:
            log.info(
                "predict %s on %s, %d at once: k=%d is best, %.3f ms a token",
                *(row["component"], job.hardware.name, row["concurrency"], row["best_k"]),
                row["ms_per_token"],
            )


def acceptance_lengths(
    rows: Sequence[Row], component: str, proposer: str, temperature: float
) -> tuple[tuple[Length, ...], float]:
    """Acceptance lengths at 0, 1, ... drafted tokens, and the tokens of a measured request.

    A k that was measured has its row's length and interval. Between those, the length is one and
    the first k positions of the next larger one; what it is above 1 keeps its relative interval.

    Args:
        rows: of acceptance.json.
        component: of the profile.
        proposer: that drafted.
        temperature: at which that traffic is served.

    Raises:
        ValueError: there is no such row, or one has a length outside 1..k+1.
    """
    own = [r for r in rows if r["component"] == component and r["acceptance_by_position"]]
    known = ", ".join(sorted({r["proposer"] for r in own} - {"none"})) or "none is"
    found = any(r["proposer"] == proposer for r in own)
    require(found, "predict.proposer", f"be measured for {component} ({known})", proposer)
    own = [r for r in own if (r["proposer"], r["temperature"]) == (proposer, temperature)]
    key = "measure.temperatures"
    require(bool(own), key, f"have what {component} is served at", f"none at {temperature:g}")
    by_k = {row["num_draft_tokens"]: row for row in own}
    lengths = [Length(1.0, 1.0, 1.0)]
    for k in range(1, max(by_k) + 1):
        row = by_k[min(measured for measured in by_k if measured >= k)]
        value = 1 + sum(row["acceptance_by_position"][:k])
        key = f"acceptance.json: acceptance_length of {component}"
        require(1 <= value <= k + 1, key, f"lie in [1, {k + 1}] at k = {k}", f"{value:g}")
        above = row["acceptance_length"] - 1
        part = (value - 1) / above if above > 0 else 1.0
        ends = [1 + part * (row[f"acceptance_length_{end}"] - 1) for end in ("low", "high")]
        lengths.append(Length(value, *ends))
    longest = by_k[max(by_k)]
    return tuple(lengths), longest["num_tokens"] / longest["num_prompts"]


def _traffic(job: PredictJob, component: ComponentConfig) -> Traffic:
    """Of one component: lengths by the profile, else those of `predict`."""
    config, tokens = job.config, None
    if config.acceptance is not None:
        given = {a.component: a for a in config.acceptance}
        key = "predict.acceptance"
        require(component.name in given, key, "name each component", f"none of {component.name}")
        lengths = (Length(1.0), *map(Length, given[component.name].lengths))
    else:
        require(job.acceptance is not None, "predict.acceptance", "be given", "null")
        lengths, tokens = acceptance_lengths(
            job.acceptance or [], component.name, config.proposer, component.temperature
        )
    prompt, output = float(config.prompt_tokens), tokens or float(config.output_tokens)
    if component.prompt_tokens is not None and component.output_tokens is not None:
        output = mean(component.output_tokens)
        prompt = _prompt_tokens(job.profile, component)
    return Traffic(component.name, lengths, tokens or output, prompt, output)


def _prompt_tokens(profile: ProfileConfig, component: ComponentConfig) -> float:
    """Of a request on average; where sessions have turns, with all that came before."""
    if component.turns is None and component.prompt_tokens is not None:
        new = mean(component.prompt_tokens) + component.shared_prefix_tokens
        return new / profile.scale
    # A session's later prompts hold its earlier ones, so that no formula is at hand.
    alone = replace(profile, components=[replace(component, weight=1.0)])
    sessions = draw_sessions(alone, NUM_SESSIONS, seed=0)
    return fmean(prompt for session in sessions for prompt in session.prompts())


def _description(job: PredictJob) -> ModelConfig:
    if job.config.model is not None:
        require(not job.hardware.measured, "hardware", "have values for predict.model", "null")
        return job.config.model
    require(job.info is not None, "predict.model", "be given without a target", "null")
    assert job.info is not None
    return described(job.info, job.config.format)


def _measured(job: PredictJob, description: ModelConfig) -> Measured:
    assert job.open_engine is not None
    engine = job.open_engine()
    head = None
    if job.speculator is not None and job.config.proposer != LOOKUP:
        config, weights = (job.speculator.file(n) for n in ("config.json", "model.safetensors"))
        head = load_head(config, weights, engine.target.device)
    return measure(engine, description, head)


def _latency_rows(config: PredictConfig, model: LatencyModel, traffic: Traffic) -> Iterator[Row]:
    """By k and load. A row's interval is that of its acceptance length, through the model."""
    for k, length in enumerate(traffic.lengths):
        for concurrency in config.concurrencies:
            load = Load(concurrency, config.hit_rate, config.disaggregated)
            split = model.round_split(concurrency, k, traffic.context_tokens)
            alone = split.total / length.value
            share = prefill_share(model, traffic, load, alone)
            seconds = alone * slowdown(share)
            row = {
                "kind": "latency",
                "component": traffic.name,
                "num_draft_tokens": k,
                "concurrency": concurrency,
                "context_tokens": traffic.context_tokens,
                "acceptance_length": length.value,
                "ms_per_token": 1e3 * seconds,
                "tokens_per_second_per_user": 1 / seconds,
                "tokens_per_second": concurrency / seconds,
                "round_ms": 1e3 * split.total,
                "prefill_share": share,
            }
            row |= {f"{part}_ms": 1e3 * taken for part, taken in vars(split).items()}
            if length.low is not None and length.high is not None:
                # What reading prompts adds to a token does not depend on the acceptance length.
                added = seconds - alone
                ends = [added + split.total / at for at in (length.high, length.low)]
                row |= {
                    "acceptance_length_low": length.low,
                    "acceptance_length_high": length.high,
                    "ms_per_token_low": 1e3 * ends[0],
                    "ms_per_token_high": 1e3 * ends[1],
                    "tokens_per_second_per_user_low": 1 / ends[1],
                    "tokens_per_second_per_user_high": 1 / ends[0],
                }
            yield row


def _best_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """The k of the least time a token, of each kind of traffic and load."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["component"], row["concurrency"]), []).append(row)
    for (component, concurrency), own in groups.items():
        best = min(own, key=lambda row: float(row["ms_per_token"]))
        plain = next(row for row in own if row["num_draft_tokens"] == 0)
        yield {
            "kind": "best",
            "component": component,
            "concurrency": concurrency,
            "best_k": best["num_draft_tokens"],
            "ms_per_token": best["ms_per_token"],
            "over_plain": plain["ms_per_token"] / best["ms_per_token"],
        }


def _mix_rows(
    config: PredictConfig,
    model: LatencyModel,
    components: Sequence[Traffic],
    weights: Mapping[str, float],
) -> Iterator[Row]:
    """What a token of the mix takes more where a component has 10 points more of the requests."""
    total = sum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    for component in components:
        share = min(1.0, shares[component.name] + SHARE_CHANGE)
        rest = (1 - share) / (1 - shares[component.name])
        changed = {name: rest * old for name, old in shares.items()} | {component.name: share}
        mixes = [mixed(components, w, MIX) for w in (shares, changed)]
        pairs = zip(*(_latency_rows(config, model, mix) for mix in mixes), strict=True)
        for before, after in pairs:
            yield {
                "kind": "mix_change",
                "component": component.name,
                "share": shares[component.name],
                "share_change": share - shares[component.name],
                "num_draft_tokens": before["num_draft_tokens"],
                "concurrency": before["concurrency"],
                "ms_per_token_change": after["ms_per_token"] - before["ms_per_token"],
            }


def _pass_rows(found: Measured) -> Iterator[Row]:
    for timed in found.passes:
        seconds = modelled(found.model, timed)
        yield {
            "kind": "pass",
            **{name: value for name, value in asdict(timed).items() if name != "seconds"},
            "measured_ms": 1e3 * timed.seconds,
            "modelled_ms": 1e3 * seconds,
            "relative_error": seconds / timed.seconds - 1,
        }
    yield {"kind": "draft", "measured_ms": 1e3 * found.draft_seconds}


def _constants(job: PredictJob, found: Measured | None) -> dict[str, dict[str, float | str]]:
    if found is None:
        return {name: asdict(constant) for name, constant in job.hardware.constants().items()}
    m, speed = found.model, found.memory_bytes_per_second
    fitted = "fitted to the passes in `rows`"
    return {
        "memory_bytes_per_second": {"value": speed, "source": "measured: reading 64 MiB"},
        "achieved_bandwidth": {"value": m.bytes_per_second / speed, "source": fitted},
        "token_compute_seconds": {"value": m.token_compute_seconds, "source": fitted},
        "head_compute_seconds": {"value": m.head_compute_seconds, "source": fitted},
        "context_compute_seconds": {"value": m.context_compute_seconds, "source": fitted},
        "seconds_per_layer": {"value": m.seconds_per_layer, "source": fitted},
        "overlap": {"value": m.overlap, "source": fitted},
        "draft_cost": {"value": m.draft_cost, "source": "measured: 4 drafted tokens over a pass"},
    }
