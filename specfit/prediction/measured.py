"""The latency model's constants on the machine at hand, from passes that are timed.

Passes of several widths, contexts and batches are timed through the decode loop's own target. Then
the time of one byte, of one operation of a product, of one of attention, and of one layer are
fitted to them by least squares on the relative error, none of them negative and no byte quicker
than memory is read here; and so is what reading and computing hide of each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from time import perf_counter

import numpy as np
import torch

from specfit.checks import require
from specfit.draft_vocab import DraftVocab
from specfit.engine import DecodeEngine
from specfit.latency.costs import draft_seconds
from specfit.prediction.config import ModelConfig
from specfit.prediction.model import LatencyModel
from specfit.speculators.eagle3 import Eagle3
from specfit_kernels.floors import read_bytes_per_second
from specfit_serve.llama import LlamaTarget
from specfit_serve.protocols import DecodeTarget

# Tokens a sequence, by the number of sequences: most of one, which is what latency is asked of.
WIDTHS = {1: (1, 2, 3, 5, 9), 4: (1, 3)}
CONTEXTS = (64, 256)  # tokens; shorter where the target's context is
SECONDS = 4.0  # for timing passes, if that is enough for MIN_REPETITIONS of each
MIN_REPETITIONS = 3
DRAFT_TOKENS = 4
MAX_TURNS = 5  # of the fit
OVERLAPS = (1.0, 0.75, 0.5, 0.25, 0.0)  # that are tried
DRAFT_REPETITIONS = 7

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Pass:
    """One that was timed; `num_logits` are of each sequence."""

    batch: int
    tokens_per_sequence: int
    context_tokens: int  # before it
    num_logits: int
    seconds: float  # the median of the repetitions


@dataclass(frozen=True)
class Measured:
    """What was timed, and the model that fits it."""

    model: LatencyModel
    passes: list[Pass]
    memory_bytes_per_second: float
    draft_seconds: float  # of one drafted token, alone; 0 without a head


def measure(
    engine: DecodeEngine, description: ModelConfig, head: tuple[Eagle3, DraftVocab] | None
) -> Measured:
    """Times the target, and the head if there is one, and fits the model.

    Args:
        engine: decodes the target, on a CPU.
        description: of the target.
        head: what drafts.

    Raises:
        ValueError: the target is on another device.
    """
    device = engine.target.device.type
    require(device == "cpu", "hardware", "have its constants given for a device like this", device)
    limit = engine.target.info.max_position_embeddings
    widest = max(*WIDTHS[1], DRAFT_TOKENS + 1)
    longest = min(max(CONTEXTS), limit - widest - DRAFT_REPETITIONS)
    room = longest + widest + DRAFT_REPETITIONS
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    aux_layers = list(head[0].config.aux_layers) if head else None
    target = engine.slots(num_slots=max(WIDTHS), max_length=room, aux_layers=aux_layers)
    bandwidth = read_bytes_per_second()
    passes = time_passes(target, contexts)
    seconds = 0.0
    if head is not None:
        proposer = engine.eagle3(*head, num_slots=max(WIDTHS), max_length=room)
        seconds = draft_seconds(target, proposer, DRAFT_TOKENS, contexts[0], DRAFT_REPETITIONS)
    model = fit(passes, unit_model(target, description), bandwidth)
    model = replace(model, draft_cost=seconds / model.step_seconds(1, 1, 0.0))
    return Measured(model, passes, bandwidth, seconds)


def time_passes(target: DecodeTarget, contexts: Sequence[int]) -> list[Pass]:
    """The prefill that fills the slots, then all shapes in turn, several times over.

    Args:
        target: with empty slots.
        contexts: tokens before a pass, ascending.
    """
    generator = torch.Generator().manual_seed(0)
    size = (max(WIDTHS), contexts[-1] + max(WIDTHS[1]))
    tokens = torch.randint(target.vocab_size, size, generator=generator)

    def run(batch: int, width: int, context: int, *, last_only: bool = False) -> float:
        part, starts = tokens[:batch, context : context + width], torch.full((batch,), context)
        began = perf_counter()
        target.forward(part, starts, 0, last_only).logits.argmax(-1)
        return perf_counter() - began

    run(1, 1, 0)  # what is compiled or packed at first use
    longest = contexts[-1]
    prefill = run(max(WIDTHS), longest, 0, last_only=True)
    found: dict[tuple[int, int, int], list[float]] = {
        (batch, width, context): []
        for batch, widths in WIDTHS.items()
        for width, context in product(widths, contexts)
    }
    end = perf_counter() + SECONDS
    repetitions = 0
    while repetitions <= MIN_REPETITIONS or perf_counter() < end:
        for shape, times in found.items():
            taken = run(*shape)
            if repetitions > 0:  # the first warms up
                times.append(taken)
        repetitions += 1
    for slot in range(max(WIDTHS)):
        target.release(slot)
    passes = [Pass(b, m, c, m, median(times)) for (b, m, c), times in found.items()]
    return [*passes, Pass(max(WIDTHS), longest, 0, 1, prefill)]


def unit_model(target: DecodeTarget, description: ModelConfig) -> LatencyModel:
    """The target, where a byte, an operation and a layer take one second each."""
    d = description
    weight_bytes = d.attention.num_bytes + d.shared.num_bytes + d.head.num_bytes
    kv_bytes = replace(d.attention, parameters=d.kv_values_per_token, format=d.kv_format).num_bytes
    if isinstance(target, LlamaTarget):
        weight_bytes, kv_bytes = float(target.weights.num_bytes), float(target.column_bytes)
    share = d.num_active_experts / d.num_experts
    per_token = d.attention.parameters + d.shared.parameters + share * d.experts.parameters
    return LatencyModel(
        num_layers=d.num_layers,
        weight_bytes=weight_bytes,
        expert_bytes=d.experts.num_bytes,
        active_share=share,
        kv_bytes_per_token=kv_bytes,
        token_compute_seconds=2 * per_token,
        head_compute_seconds=2 * d.head.parameters,
        context_compute_seconds=d.context_flops,
        num_devices=1,
        bytes_per_second=1.0,
        seconds_per_layer=1.0,
        communication_seconds_per_layer=0.0,
        draft_cost=0.0,
    )


def fit(passes: Sequence[Pass], unit: LatencyModel, memory_bytes_per_second: float) -> LatencyModel:
    """The constants, of OVERLAPS among them, that make the least squared relative error.

    With an overlap, and with it settled which passes read longer than they compute, the model is
    linear in the other four. Starting from every split of the passes by operations over bytes, the
    constants and the split that they give take turns; the best of all is kept.
    """
    reads = np.array([_sides(p, unit)[0] for p in passes])
    computes = np.array([_sides(p, unit)[1] for p in passes])
    intensities = computes[:, 1] / reads[:, 0]
    times = np.array([p.seconds for p in passes])
    layers = np.array([[0.0, 0.0, 0.0, float(unit.num_layers)]])
    best: Array = np.zeros(4)
    best_overlap, least = 1.0, np.inf
    for overlap, intensity in product(OVERLAPS, [*sorted(intensities), np.inf]):
        # Of each pass, where it reads longer and where it computes longer.
        reading = reads + (1 - overlap) * computes + layers
        computing = computes + (1 - overlap) * reads + layers
        is_reading = intensities < intensity
        for _ in range(MAX_TURNS):
            rows = np.where(is_reading[:, None], reading, computing)
            # A byte takes 1 / memory_bytes_per_second and what is fitted.
            known = rows[:, 0] / memory_bytes_per_second
            found = _not_negative(rows / times[:, None], 1 - known / times)
            found[0] += 1 / memory_bytes_per_second
            taken = np.maximum(reading @ found, computing @ found)
            loss = float(((taken / times - 1) ** 2).sum())
            if loss < least:
                best, best_overlap, least = found, overlap, loss
            before, is_reading = is_reading, reading @ found > computing @ found
            if (is_reading == before).all():
                break
    return replace(_with(unit, best), overlap=best_overlap)


def modelled(model: LatencyModel, timed: Pass) -> float:
    """Seconds of that pass by the model."""
    m, context = timed.tokens_per_sequence, float(timed.context_tokens)
    return model.pass_split(timed.batch, m, context, timed.num_logits).total


def _sides(p: Pass, unit: LatencyModel) -> tuple[list[float], list[float]]:
    """Bytes, operations of products and of attention, and none of layers: read, and computed."""
    n = p.batch * p.tokens_per_sequence
    products = n * unit.token_compute_seconds
    products += p.batch * p.num_logits * unit.head_compute_seconds
    context = float(p.context_tokens)
    attention = n * (context + p.tokens_per_sequence / 2) * unit.context_compute_seconds
    read = unit.weight_bytes_read(n) + unit.kv_bytes_read(p.batch, p.tokens_per_sequence, context)
    return [read, 0.0, 0.0, 0.0], [0.0, products, attention, 0.0]


def _with(unit: LatencyModel, constants: Array) -> LatencyModel:
    byte, operation, attention, layer = (float(c) for c in constants)
    return replace(
        unit,
        bytes_per_second=1 / byte,
        token_compute_seconds=operation * unit.token_compute_seconds,
        head_compute_seconds=operation * unit.head_compute_seconds,
        context_compute_seconds=attention * unit.context_compute_seconds,
        seconds_per_layer=layer,
    )


def _not_negative(rows: Array, wanted: Array) -> Array:
    """Least squares of which no value is negative: the best over all sets of those that are 0."""
    best, least = np.zeros(rows.shape[1]), float(wanted @ wanted)
    for chosen in _subsets(rows.shape[1]):
        scale = np.linalg.norm(rows[:, chosen], axis=0)
        if not scale.all():
            continue
        part = np.linalg.lstsq(rows[:, chosen] / scale, wanted, rcond=None)[0] / scale
        error = rows[:, chosen] @ part - wanted
        if part.min() >= 0 and error @ error < least:
            best, least = np.zeros(rows.shape[1]), float(error @ error)
            best[chosen] = part
    return best


def _subsets(num: int) -> Iterator[list[int]]:
    for kept in product((False, True), repeat=num):
        chosen = [i for i in range(num) if kept[i]]
        if chosen:
            yield chosen
