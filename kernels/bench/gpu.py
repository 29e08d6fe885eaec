"""The Triton kernels beside what a GPU's memory allows and torch's bf16 products, in one run.

    python kernels/bench/gpu.py
    python kernels/bench/gpu.py --acceptance .82 .74 .7 .66 --draft-ms .4

Weights come from memory: each product goes over copies that no cache holds. Launches are captured
in CUDA graphs and overlap as in a pass; times are of the device, medians of several replays. Then
Llama 3.1 8B's sizes with random weights, all layers: the time of a pass by its width, and rounds
of speculation that keep as many tokens as a report has measured (`conditional_acceptance`).
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.synthetic import (
    LLAMA_8B,
    SMOLLM2,
    Geometry,
    random_bf16,
    random_matrix,
    random_weights,
)
from specfit_kernels import support
from specfit_kernels.attention import attn_combine, attn_verify
from specfit_kernels.attention_twins import AttentionPartials
from specfit_kernels.gemv_w4a16 import gemv_w4a16
from specfit_kernels.kv_pages import PAGE, KVPages, Places
from specfit_kernels.layer_twins import Rope
from specfit_kernels.linear_twins import Halves, Terms
from specfit_kernels.norm_quant import rmsnorm_quant
from specfit_kernels.rope_append import rope_append
from specfit_kernels.silu_mul import silu_mul_quant
from specfit_kernels.skinny_bf16 import skinny_bf16
from specfit_kernels.skinny_w4a4 import skinny_w4a4
from specfit_serve.gpu import GpuTarget
from specfit_serve.gpu_weights import Matrix

CACHE_BYTES = 256 << 20  # of copies of one weight: more than caches hold
MAX_COPIES = 1000
DEVICE = torch.device("cuda", 0)
Launch = Callable[[], object]


def device_seconds(launches: Sequence[Launch], repetitions: int = 9) -> float:
    """Of one launch, when all are replayed as a CUDA graph."""
    for launch in launches[:2]:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return replay_seconds(graph.replay, repetitions) / len(launches)


def replay_seconds(replay: Launch, repetitions: int) -> float:
    """Of what runs on the device, after two that are not timed."""
    times = []
    for _ in range(repetitions + 2):
        began, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        began.record()
        replay()
        ended.record()
        ended.synchronize()
        times.append(float(began.elapsed_time(ended)) / 1e3)
    return statistics.median(times[2:])


def read_bytes_per_second() -> float:
    """Of the device's memory: torch's sum over 2 GiB."""
    values = torch.ones(1 << 29, device=DEVICE)
    return values.nbytes / replay_seconds(values.sum, 9)


def some_tokens(num_tokens: int, columns: int, num_terms: int) -> Terms | Halves:
    """Zeros, which take as long as others."""
    if num_terms == 0:
        halves = Halves.empty(num_tokens, columns, DEVICE)
        halves.values.zero_()
        halves.token_scales.fill_(1)
        return halves
    terms = Terms.empty(num_tokens, columns, num_terms, DEVICE)
    terms.codes.zero_()
    terms.scales.fill_(1)
    terms.token_scales.fill_(1)
    return terms


@dataclass(frozen=True)
class Kind:
    """A way to multiply a few tokens."""

    name: str
    bits: float  # a weight
    weight: Callable[[tuple[int, int]], Any]  # of rows and columns
    buffers: Callable[[Any, int], tuple[Any, Any]]  # for a weight: some tokens, and their products
    multiply: Callable[[Any, Any, Any], object]


def ours(name: str, num_terms: int) -> Kind:
    """Layers' matrices in NVFP4."""

    def buffers(weight: Matrix, num_tokens: int) -> tuple[Terms | Halves, Tensor]:
        tokens = some_tokens(num_tokens, weight.columns, num_terms)
        shape = weight.splits.num, num_tokens, len(weight.row_scales)
        return tokens, torch.empty(shape, device=DEVICE)

    return Kind(
        name,
        4.5,
        lambda shape: random_matrix(shape, num_terms, DEVICE),
        buffers,
        partial(skinny_w4a4 if num_terms else gemv_w4a16, pdl=True),
    )


def in_floats(dtype: torch.dtype) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """Tokens and products of a type."""

    def buffers(weight: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        rows, columns = weight.shape
        x, y = (torch.zeros(num_tokens, n, dtype=dtype, device=DEVICE) for n in (columns, rows))
        return x, y

    return buffers


BF16 = partial(random_bf16, device=DEVICE)
HEAD = Kind("skinny_bf16", 16, BF16, in_floats(torch.float32), partial(skinny_bf16, pdl=True))
TORCH = Kind(
    "torch bf16", 16, BF16, in_floats(torch.bfloat16), lambda w, x, y: torch.mm(x, w.t(), out=y)
)


def write_products(
    geometry: Geometry, kinds: list[Kind], rows: list[int], bandwidth: float
) -> None:
    """A table of microseconds, and shares of what memory allows."""
    shapes = {name: (shape, kinds) for name, shape in geometry.shapes.items()}
    head = geometry.vocab_size, geometry.hidden
    shapes["head"] = head, [HEAD, TORCH]
    for name, (shape, some) in shapes.items():
        header = "".join(f"{f'us M={num}':>10} floor" for num in rows)
        sys.stdout.write(f"\n{f'{geometry.name} {name} {shape[0]}x{shape[1]}':<36}{header}\n")
        for kind in some:
            num_bytes = kind.bits / 8 * shape[0] * shape[1]
            copies = min(MAX_COPIES, max(2, round(CACHE_BYTES / num_bytes)))
            weights = [kind.weight(shape) for _ in range(copies)]
            cells = ""
            for num in rows:
                x, y = kind.buffers(weights[0], num)
                seconds = device_seconds([partial(kind.multiply, w, x, y) for w in weights])
                cells += f"{1e6 * seconds:10.2f} {num_bytes / bandwidth / seconds:5.2f}"
            sys.stdout.write(f"{kind.name:<36}{cells}\n")
            sys.stdout.flush()


def between(geometry: Geometry, num_terms: int, num_tokens: int, context: int) -> dict[str, Launch]:
    """What a layer launches besides products, for tokens of one sequence."""
    g, n = geometry, num_tokens
    heads, width = g.num_heads * g.head_dim, g.shapes["qkv"][0]
    num_pages = -(-(context + n) // PAGE)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=DEVICE)

    places = Places(
        torch.arange(context, context + n, device=DEVICE).int(),
        zeros(n).int(),
        torch.arange(num_pages, device=DEVICE).int()[None],
    )
    kv = KVPages.empty(num_pages, g.num_kv_heads, g.head_dim, DEVICE)
    kv.keys.zero_()
    kv.values.zero_()
    angles = Rope(*(zeros(context + n, g.head_dim // 2) for _ in range(2)))
    partials = AttentionPartials.empty(n, g.num_heads, g.head_dim, context + n, DEVICE)
    hidden, inner = (some_tokens(n, columns, num_terms) for columns in (g.hidden, g.inner))
    attended = some_tokens(n, heads, num_terms)
    stream, queries, weight = zeros(n, g.hidden), zeros(n, heads), zeros(g.hidden)
    sums, qkv, gate_up = zeros(2, n, g.hidden), zeros(2, n, width), zeros(1, n, 2 * g.inner)
    return {
        "rmsnorm_quant": lambda: rmsnorm_quant(
            stream, weight, 1e-5, hidden, partials=sums, pdl=True
        ),
        "rope_append": lambda: rope_append(qkv, places, kv, angles, queries, pdl=True),
        f"attn_verify {context}": lambda: attn_verify(queries, places, kv, partials, n, pdl=True),
        f"attn_combine {context}": lambda: attn_combine(partials, places, attended, n, pdl=True),
        "silu_mul_quant": lambda: silu_mul_quant(gate_up, inner, pdl=True),
    }


def write_between(
    geometry: Geometry, num_terms: int, rows: list[int], contexts: list[int], bandwidth: float
) -> None:
    """Microseconds of launches one after another; the floor is that of keys and values."""
    header = "".join(f"{f'us M={num}':>10}" for num in rows)
    sys.stdout.write(f"\n{f'{geometry.name}, between products':<36}{header}\n")
    for i, context in enumerate(contexts):
        made = [between(geometry, num_terms, num, context) for num in rows]
        names = [name for name in made[0] if i == 0 or name.startswith("attn")]
        for name in names:
            cells = "".join(f"{1e6 * device_seconds([m[name]] * 50):10.2f}" for m in made)
            floor = ""
            if name.startswith("attn_verify"):
                num_bytes = 4 * context * geometry.num_kv_heads * geometry.head_dim
                floor = f"   floor {1e6 * num_bytes / bandwidth:.2f}, or less from a cache"
            sys.stdout.write(f"{name:<36}{cells}{floor}\n")
        sys.stdout.flush()


class Decoding:
    """One sequence of a target, behind a context of random tokens."""

    def __init__(self, target: GpuTarget, context: int) -> None:
        self.target = target
        self.context = context
        self.tokens = torch.randint(target.vocab_size, (1, context), device=DEVICE)
        target.reserve(0, target.max_length)

    def read(self) -> float:
        """Seconds of the prompt."""
        began = perf_counter()
        start = torch.zeros(1, dtype=torch.long, device=DEVICE)
        logits = self.target.forward(self.tokens, start, 0, last_only=True).logits
        int(logits.argmax())
        return perf_counter() - began

    def run(self, start: int, width: int) -> None:
        """A pass, and the choices read by the host, as in a round."""
        starts = torch.tensor([start], device=DEVICE)
        self.target.forward(self.tokens[:, :width], starts, 0).logits.argmax(-1).tolist()

    def pass_seconds(self, width: int, repetitions: int = 20) -> tuple[float, float]:
        """Of a pass: of the device, and with all that the host does in between."""
        starts = torch.tensor([self.context], device=DEVICE)
        tokens = self.tokens[:, :width]
        of_device = replay_seconds(lambda: self.target.forward(tokens, starts, 0), repetitions)
        times = []
        for _ in range(repetitions):
            began = perf_counter()
            self.run(self.context, width)
            times.append(perf_counter() - began)
        return of_device, statistics.median(times)

    def rounds_seconds(
        self, kept: Sequence[float], num_tokens: int, num_draft_tokens: int
    ) -> tuple[float, int, int]:
        """Of rounds until so many tokens are emitted; and how many tokens and rounds there were.

        Token i of a draft is kept with probability `kept[i]` if all before it are.
        """
        draws, emitted, rounds = random.Random(0), 0, 0
        began = perf_counter()
        while emitted < num_tokens:
            self.run(self.context + emitted, num_draft_tokens + 1)
            some = kept[:num_draft_tokens]
            emitted += 1 + sum(1 for _ in takewhile(lambda p: draws.random() < p, some))
            rounds += 1
        return perf_counter() - began, emitted, rounds


def write_decoding(
    num_terms: int, context: int, acceptance: Sequence[float], draft_ms: float, bandwidth: float
) -> None:
    """All layers of 8B sizes."""
    weights = random_weights(LLAMA_8B, num_terms, DEVICE)
    num_tokens, widest = 256, max(8, len(acceptance) + 1)
    target = GpuTarget(
        weights, num_slots=1, max_length=context + num_tokens + 2 * widest, aux_layers=None
    )
    decoding = Decoding(target, context)
    decoding.read()
    seconds = decoding.read()
    num_bytes = weights.num_bytes + context * target.column_bytes
    floor = num_bytes / bandwidth
    sys.stdout.write(
        f"\n{LLAMA_8B.name} geometry, {context} columns, {num_bytes / 1e9:.2f} GB a pass: floor "
        f"{1e3 * floor:.3f} ms; prompt {context / seconds:.0f} tokens/s\n"
        f"{'width':<8}{'ms':>8}{'floor':>7}{'of 1':>7}{'ms, host too':>15}\n"
    )
    plain = 0.0
    for width in range(1, 9):
        of_device, of_both = decoding.pass_seconds(width)
        plain = plain or of_device
        sys.stdout.write(
            f"{width:<8}{1e3 * of_device:8.3f}{floor / of_device:7.2f}{of_device / plain:7.2f}"
            f"{1e3 * of_both:15.3f}\n"
        )
    if not acceptance:
        sys.stdout.write("no rounds: --acceptance gives what a report has measured\n")
        return
    plain = 0.0
    for k in range(len(acceptance) + 1):
        decoding.run(context, k + 1)
        seconds, emitted, rounds = decoding.rounds_seconds(acceptance, num_tokens, k)
        speed = emitted / (seconds + rounds * k * draft_ms / 1e3)
        plain = plain or speed
        sys.stdout.write(
            f"k={k:<3} {emitted / rounds:5.2f} tokens a round, {speed:8.1f} tokens/s, "
            f"{speed / plain:5.2f} of plain; a drafted token {draft_ms} ms\n"
        )


def main() -> None:
    """Writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[], help="by position")
    parser.add_argument("--draft-ms", type=float, default=0.0, help="of a drafted token")
    options = parser.parse_args()
    can = support.runnable(DEVICE)
    if support.Kernel.gemv_w4a16 not in can:
        sys.stdout.write("skipped: no CUDA device that runs the kernels\n")
        return
    kinds = [ours("gemv_w4a16", 0)]
    if support.Kernel.skinny_w4a4 in can:
        kinds += [ours(f"skinny_w4a4, {n} terms", n) for n in (1, 3)]
    num_terms = 3 if len(kinds) > 1 else 0
    bandwidth = read_bytes_per_second()
    name, arch = torch.cuda.get_device_name(DEVICE), support.architecture(DEVICE)
    sys.stdout.write(f"{name} (sm_{arch}), reads {bandwidth / 1e12:.2f} TB/s\n")
    with torch.inference_mode():
        for geometry in (SMOLLM2, LLAMA_8B):
            write_products(geometry, [*kinds, TORCH], options.rows, bandwidth)
            write_between(geometry, num_terms, options.rows, options.contexts, bandwidth)
        context = min(options.contexts)
        write_decoding(num_terms, context, options.acceptance, options.draft_ms, bandwidth)


if __name__ == "__main__":
    main()
