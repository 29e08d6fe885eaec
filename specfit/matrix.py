"""Heads by profiles: what a head that was fitted to one traffic is worth on another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specfit.acceptance import Measured, by_session
from specfit.artifacts import Artifact
from specfit.config import RunConfig, job_config
from specfit.files import read_jsonl
from specfit.mix import counts_of, length_of

Counts = Float[Tensor, "_ 3"]  # tokens, rounds and requests of each
NUM_BOOTSTRAP, CONFIDENCE = 2000, 0.95  # resamples behind each interval, and its level
FITTED = "eagle3"  # what a measurement calls the head that was fitted to its own profile


@dataclass(frozen=True)
class Job:
    """One of a sweep: a profile, fitted with a seed."""

    profile: str
    seed: int
    cfg: RunConfig

    def beside(self, heads: Mapping[str, Artifact]) -> RunConfig:
        """The job's measurement, with the heads of other profiles by their names."""
        others = {name: str(head.path) for name, head in heads.items() if name != self.profile}
        return replace(self.cfg, measure=replace(self.cfg.measure, speculators=others, floor=None))


@dataclass(frozen=True)
class Found:
    """What was measured on one profile with one seed."""

    profile: str
    seed: int
    weights: dict[str, float]
    requests: Path  # requests.jsonl


def jobs_of(sweep: Path) -> list[Job]:
    """The jobs of a multirun folder.

    Raises:
        FileNotFoundError: it holds no job.
        ValueError: two jobs have the same profile and seed: which of them is meant is not known.
    """
    folders = [path for path in sorted(sweep.iterdir()) if (path / "job.json").is_file()]
    if not folders:
        raise FileNotFoundError(f"report.matrix must be a multirun folder with jobs, got {sweep}")
    jobs: dict[tuple[str, int], Job] = {}
    for folder in folders:
        cfg = job_config(folder)
        place = cfg.profile.name, cfg.seed
        if place in jobs:
            raise ValueError(
                f"report.matrix must have one job a profile and seed, {sweep} has several of "
                f"profile {place[0]} and seed {place[1]}"
            )
        jobs[place] = Job(cfg.profile.name, cfg.seed, cfg)
    return list(jobs.values())


def matrix(found: Sequence[Found]) -> list[dict[str, Any]]:
    """A row a head and profile: acceptance length, and its change from the matched head's.

    The lengths are of the profile's mix, tokens over rounds, all seeds together. Intervals draw
    seeds first and then the sessions of each, the same ones for both heads of a change. Of few
    seeds they are a little narrow in what training varies (with three, a resample has two thirds of
    the variance): the changes of each seed stand beside them.
    """
    profiles = list(dict.fromkeys(f.profile for f in found))
    rows = []
    for profile in profiles:
        own = [f for f in found if f.profile == profile]
        requests = [_of_heads(f) for f in own]
        by_head = _counts_by_head(own, requests)
        matched = _resampled(by_head[profile], own[0].weights)
        for head, counts in by_head.items():
            lengths = _resampled(counts, own[0].weights)
            length, best = (_pooled(by_head[name], own[0].weights) for name in (head, profile))
            low, high = _interval(lengths)
            change_low, change_high = _interval(lengths / matched - 1)
            rows.append(
                {
                    "head": head,
                    "profile": profile,
                    "num_draft_tokens": requests[0][0].num_draft_tokens,
                    "temperatures": sorted({m.temperature for m in requests[0]}),
                    "num_seeds": len(counts),
                    "num_sessions": sum(len(c) for of in counts for c in of.values()),
                    "acceptance_length": length,
                    "acceptance_length_low": low,
                    "acceptance_length_high": high,
                    "by_seed": [_pooled([of], own[0].weights) for of in counts],
                    "change": length / best - 1,
                    "change_by_seed": [
                        _pooled([of], own[0].weights) / _pooled([at], own[0].weights) - 1
                        for of, at in zip(counts, by_head[profile], strict=True)
                    ],
                    "change_low": change_low,
                    "change_high": change_high,
                }
            )
    return rows


def _of_heads(one: Found) -> list[Measured]:
    """The answers under heads, at the smallest k and each component's first temperature."""
    measured = [Measured(**row) for row in read_jsonl(one.requests)]
    k = min(m.num_draft_tokens for m in measured if m.proposer == FITTED)
    own = [m for m in measured if m.proposer not in ("none", "ngram") and m.num_draft_tokens == k]
    first = {m.component: m.temperature for m in reversed(own)}
    return [m for m in own if m.temperature == first[m.component]]


def _counts_by_head(
    found: Sequence[Found], requests: Sequence[Sequence[Measured]]
) -> dict[str, list[dict[str, Counts]]]:
    """By head: of each seed, by component, the counts of the sessions, in one order for all."""
    by_head: dict[str, list[dict[str, Counts]]] = {}
    for one, measured in zip(found, requests, strict=True):
        for proposer in dict.fromkeys(m.proposer for m in measured):
            own = [m for m in measured if m.proposer == proposer]
            name = one.profile if proposer == FITTED else proposer
            by_head.setdefault(name, []).append(
                {c: _counts([m for m in own if m.component == c]) for c in one.weights}
            )
    return {name: of for name, of in by_head.items() if len(of) == len(found)}


def _counts(measured: Sequence[Measured]) -> Counts:
    return counts_of([requests for _, requests in sorted(by_session(measured).items())])


def _pooled(counts: Sequence[Mapping[str, Counts]], weights: Mapping[str, float]) -> float:
    return float(
        length_of(_total([{n: c.sum(0) for n, c in of.items()} for of in counts]), weights)
    )


def _total(seeds: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of the seeds' sums, by component."""
    return {name: torch.stack([of[name] for of in seeds]).sum(0) for name in seeds[0]}


def _resampled(
    counts: Sequence[Mapping[str, Counts]], weights: Mapping[str, float]
) -> Float[np.ndarray, " resamples"]:
    """Lengths of the mix: as many seeds as there are, drawn again, then sessions of each."""
    generator = np.random.default_rng(0)  # the same sessions for every head
    num = len(counts)
    seeds = torch.from_numpy(generator.integers(num, size=(NUM_BOOTSTRAP, num)))
    sums = {}
    for name in counts[0]:
        padded = pad_sequence([of[name] for of in counts], batch_first=True)
        sizes = torch.tensor([len(of[name]) for of in counts])[seeds][..., None]
        drawn = generator.random((*seeds.shape, padded.shape[1]))
        sessions = padded[seeds[..., None], (torch.from_numpy(drawn) * sizes).long()]
        is_drawn = torch.arange(padded.shape[1]) < sizes
        sums[name] = (sessions * is_drawn[..., None]).sum((1, 2))
    found: Float[np.ndarray, " resamples"] = length_of(sums, weights).numpy()
    return found


def _interval(values: Float[np.ndarray, " resamples"]) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@runtime_checkable
class Makes(Protocol):
    """A path that makes a head and measures it."""

    @property
    def weights(self) -> dict[str, float]:
        """Of its profile's components, fitted to logs where it asks for that."""

    @property
    def train(self) -> Artifact:
        """The head."""

    @property
    def measure(self) -> Artifact:
        """It, and those of `measure.speculators`."""


def measured_heads(sweep: str | None, path_of: Callable[[RunConfig], Makes]) -> list[Found]:
    """What is measured of each head of a sweep on each of its profiles; made where it is missing.

    Heads meet on the prompts of the profile and the seed: those of another seed are not measured.
    """
    if sweep is None:
        return []
    jobs = jobs_of(Path(sweep))
    heads = {(job.profile, job.seed): path_of(job.cfg).train for job in jobs}
    found = []
    for job in jobs:
        own = {name: head for (name, seed), head in heads.items() if seed == job.seed}
        path = path_of(job.beside(own))
        requests = path.measure.file("requests.jsonl")
        found.append(Found(job.profile, job.seed, path.weights, requests))
    return found
