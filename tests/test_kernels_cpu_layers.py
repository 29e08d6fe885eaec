"""What lies between the products of the CPU kernels, and whole layers, on every path."""

import math
from copy import deepcopy

import pytest
import torch
from cpu_kernels import EPSILON, normal
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from specfit_kernels import cpu, nvfp4
from specfit_kernels.cpu_build import CpuPath
from specfit_kernels.cpu_layers import (
    PAGE,
    DecoderLayer,
    HeadNorms,
    LayerStack,
    PagedKV,
    Rope,
    Rows,
)
from specfit_kernels.cpu_weights import Activations, pack

pytest_plugins = ["cpu_fixtures"]
pytestmark = pytest.mark.usefixtures("poison", "path")

ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen2": (Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}


def angles(head_dim: int, num_positions: int = 256) -> Rope:
    turns = torch.arange(num_positions)[:, None] * 100.0 ** -torch.linspace(0, 1, head_dim // 2)
    return Rope(turns.cos(), turns.sin())


def scattered_rows(generator: torch.Generator, positions: list[int], num_pages: int) -> Rows:
    """Each row in a sequence of its own, whose pages lie anywhere; what is not used is -1."""
    used = [position // PAGE + 1 for position in positions]
    pages = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.full((len(positions), max(used)), -1)
    for sequence, count in enumerate(used):
        table[sequence, :count] = torch.tensor([pages.pop() for _ in range(count)])
    return Rows(torch.tensor(positions), torch.arange(len(positions)), table)


# --- norms, SiLU, argmax ---


@pytest.mark.parametrize("size", [1, 7, 16, 40, 576])
def test_a_norm_misses_float64_by_rounding_only(generator, size):
    x, weight = normal(generator, 5, size), normal(generator, size)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    # The mean, its root, the quotient and two products.
    bound = (size / 4 + 12) * EPSILON * exact.abs()
    assert bool(((cpu.rmsnorm(x, weight, 1e-5) - exact).abs() <= bound).all())


def test_adding_and_norm_in_one_is_adding_then_norm(generator):
    x, added, weight = normal(generator, 3, 48), normal(generator, 3, 48), normal(generator, 48)
    stream, y = cpu.add_rmsnorm(x, added, weight, 1e-5)
    assert torch.equal(stream, x + added)
    assert torch.equal(y, cpu.rmsnorm(stream, weight, 1e-5))


def test_silu_mul_is_right_from_one_end_to_the_other(generator):
    gate = torch.linspace(-100, 100, 6400).view(4, -1)
    up = normal(generator, 4, 1600)
    y = cpu.silu_mul(torch.cat([gate, up], dim=1))
    exact = gate.double() * torch.sigmoid(gate.double()) * up
    # exp() is right to 2 ulp (and below 2^-126 it is 2^-126); then a sum, a quotient, a product.
    bound = 10 * EPSILON * exact.abs() + 1e-35
    assert bool(((y - exact).abs() <= bound).all())


def test_silu_mul_keeps_nan():
    gate_up = torch.ones(1, 32)
    gate_up[0, 3] = torch.nan
    assert cpu.silu_mul(gate_up)[0].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("size", [1, 3, 16, 37, 1000])
def test_argmax_is_that_of_torch_in_ties_infinities_and_nans(generator, size):
    x = torch.randint(-3, 3, (12, size), generator=generator).float()
    x[1] = -torch.inf
    x[2, size // 2] = torch.inf
    x[3, [size // 3, size - 1]] = torch.nan
    x[4] = torch.nan
    x[5, : size // 2] = -torch.inf
    assert torch.equal(cpu.argmax(x), x.argmax(-1))


# --- RoPE and attention ---


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 8), (6, 2, 40), (4, 4, 64)])
def test_turned_keys_and_values_go_to_their_places_only(
    generator, heads, kv_heads, head_dim, dtype, with_norms
):
    rows = scattered_rows(generator, [0, 63, 64, 100, 129], num_pages=12)
    rope = angles(head_dim)
    kv = PagedKV.empty(12, kv_heads, head_dim, dtype)
    qkv = normal(generator, 5, (heads + 2 * kv_heads) * head_dim)
    norms = HeadNorms(normal(generator, head_dim), normal(generator, head_dim), 1e-6)
    queries = cpu.rope_append(qkv, rows, kv, rope, norms if with_norms else None)

    q, k, v = qkv.double().view(5, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if with_norms:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
            for x, weight in ((q, norms.queries), (k, norms.keys))
        )
    q, k = (turned(x, rope, rows.positions) for x in (q, k))
    # bf16 has 8 bits: rounding moves a value by up to 2^-9 of the power of two above it.
    close = {"rtol": 0 if dtype is torch.float32 else 2.0**-8, "atol": 1e-5}
    torch.testing.assert_close(queries.double().view(q.shape), q, rtol=0, atol=1e-5)
    pages = rows.block_table[rows.sequences, rows.positions // PAGE]
    columns = rows.positions % PAGE
    torch.testing.assert_close(kv.keys[pages, :, :, columns].double(), k, **close)
    assert torch.equal(kv.values[pages, :, columns], v.to(dtype))
    assert int(kv.keys.isfinite().sum()) == int(kv.values.isfinite().sum()) == k.numel()


def turned(heads: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """As complex numbers."""
    first, second = heads.chunk(2, dim=-1)
    factors = torch.complex(rope.cosines[positions].double(), rope.sines[positions].double())
    product = torch.complex(first, second) * factors[:, None]
    return torch.cat([product.real, product.imag], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 8), (9, 3, 64), (8, 4, 128), (7, 1, 24), (8, 1, 72), (3, 3, 256)],
)
def test_attention_misses_float64_by_rounding_only(generator, heads, kv_heads, head_dim, dtype):
    positions = [0, 1, 62, 63, 64, 127, 128, 200]
    rows = scattered_rows(generator, positions, num_pages=20)
    kv = PagedKV.empty(20, kv_heads, head_dim, dtype)
    queries = 2 * normal(generator, len(positions), heads * head_dim)
    expected = []
    for row, position in enumerate(positions):
        keys = normal(generator, position + 1, kv_heads, head_dim).to(dtype)
        values = normal(generator, position + 1, kv_heads, head_dim).to(dtype)
        for column in range(position + 1):
            page = rows.block_table[row, column // PAGE]
            kv.keys[page, :, :, column % PAGE] = keys[column]
            kv.values[page, :, column % PAGE] = values[column]
        q = queries[row].view(kv_heads, -1, head_dim).double() / math.sqrt(head_dim)
        scores = torch.einsum("hgd,chd->hgc", q, keys.double())
        weights = scores.softmax(-1)
        expected.append(torch.einsum("hgc,chd->hgd", weights, values.double()).flatten())
    y = cpu.attention(queries, rows, kv)
    # Scores reach 10 with errors of some ulp, which is what their exponentials are off by,
    # relative; weights add up to one, and values are below 5.
    torch.testing.assert_close(y.double(), torch.stack(expected), rtol=0, atol=2e-5)


def test_attention_does_not_overflow(generator):
    rows = scattered_rows(generator, [99], num_pages=2)
    kv = PagedKV.empty(2, 1, 8)
    kv.keys.fill_(1)
    kv.values.fill_(3)
    kv.keys[rows.block_table[0, 0], 0, :, 17] = 1e4
    kv.values[rows.block_table[0, 0], 0, 17] = 5
    y = cpu.attention(torch.tensor([[100.0] * 8, [-100.0] * 8]).view(1, 16), rows, kv)
    torch.testing.assert_close(y, torch.tensor([[5.0] * 8 + [3.0] * 8]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows_of_one", [1, 14])
def test_threads_share_the_columns_of_attention_and_change_no_bit(
    path, generator, rows_of_one, two_threads
):
    if path is CpuPath.torch:
        pytest.skip("torch's order of addition depends on the threads")
    # A thread takes 4096 columns and more, here half of about 14 * 300 rows and 3 heads.
    num_sequences = 14 // rows_of_one
    positions = torch.arange(300, 314)
    table = torch.randperm(5 * num_sequences, generator=generator).view(num_sequences, 5)
    rows = Rows(positions, torch.arange(num_sequences).repeat_interleave(rows_of_one), table)
    kv = PagedKV.empty(5 * num_sequences, 3, 16)
    kv.keys.copy_(normal(generator, *kv.keys.shape))
    kv.values.copy_(normal(generator, *kv.values.shape))
    queries = normal(generator, 14, 9 * 16)
    with two_threads():
        threaded = cpu.attention(queries, rows, kv)
    assert torch.equal(threaded, cpu.attention(queries, rows, kv))
    one_by_one = [
        cpu.attention(queries[i : i + 1], Rows(positions[i : i + 1], row[None], table), kv)
        for i, row in enumerate(rows.sequences)
    ]
    assert torch.equal(threaded, torch.cat(one_by_one))


# --- layers ---


def model_layer(generator: torch.Generator, architecture: str, head_dim: int):
    """A layer of transformers with NVFP4 values in its products, and ours of the same bytes."""
    kind, layer_kind, rotary_kind = ARCHITECTURES[architecture]
    config = kind(
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        attn_implementation="eager",
    )
    theirs = layer_kind(config, 0).requires_grad_(False).eval()
    for parameter in theirs.parameters():
        parameter.copy_(normal(generator, *parameter.shape) * 0.2 + (parameter.ndim == 1))
    matrices = {}
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            matrices[name.split(".")[-1]] = nvfp4.quantize(module.weight)
            module.weight.copy_(matrices[name.split(".")[-1]].dequantize())
    attention = theirs.self_attn
    q, k, v = (matrices[f"{name}_proj"] for name in "qkv")
    biases = [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    norms = None
    if architecture == "qwen3":
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, config.rms_norm_eps)
    ours = DecoderLayer(
        qkv=pack([q, k, v], bias=None if biases[0] is None else torch.cat(biases)),
        o=pack([matrices["o_proj"]]),
        gate_up=pack([matrices["gate_proj"], matrices["up_proj"]]),
        down=pack([matrices["down_proj"]]),
        input_norm=theirs.input_layernorm.weight,
        post_attention_norm=theirs.post_attention_layernorm.weight,
        eps=config.rms_norm_eps,
        head_norms=norms,
    )
    return theirs, rotary_kind(config), ours


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layer_is_that_of_transformers(generator, architecture, head_dim):
    theirs, rotary, ours = model_layer(generator, architecture, head_dim)
    length = 70
    stream = normal(generator, length, 96)
    positions = torch.arange(length)
    cosines, sines = rotary(stream[None], positions[None])
    causal = torch.full((length, length), -torch.inf).triu(1)
    expected = deepcopy(theirs).double()(
        stream[None].double(),
        attention_mask=causal[None, None].double(),
        position_embeddings=(cosines.double(), sines.double()),
    )
    expected = expected[0] if isinstance(expected, tuple) else expected
    half = head_dim // 2
    rope = Rope(cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous())
    rows = Rows(positions, torch.zeros(length, dtype=torch.int64), torch.tensor([[1, 0]]))
    one = LayerStack([ours], [PagedKV.empty(2, 2, head_dim)], rope)
    y, _ = cpu.forward_layers(stream, one, rows)
    # Seven products of some hundred terms one behind the other, each right to a millionth.
    error = (y - expected.view(length, 96)).norm() / expected.norm()
    assert float(error) < 3e-6


def stack(generator: torch.Generator, activations: Activations) -> list[DecoderLayer]:
    def packed(*rows: int, columns: int):
        parts = [nvfp4.quantize(normal(generator, some, columns) * 0.1) for some in rows]
        return pack(parts, activations=activations)

    return [
        DecoderLayer(
            qkv=packed(96, 32, 32, columns=64),
            o=packed(64, columns=96),
            gate_up=packed(112, 112, columns=64),
            down=packed(64, columns=112),
            input_norm=1 + 0.1 * normal(generator, 64),
            post_attention_norm=1 + 0.1 * normal(generator, 64),
            eps=1e-5,
        )
        for _ in range(3)
    ]


@pytest.mark.parametrize("activations", Activations)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_over_several_tokens_has_the_bits_of_one_after_another(
    path, generator, activations, dtype, two_threads
):
    layers, rope = stack(generator, activations), angles(16)
    tokens = normal(generator, 2, 80, 64)  # two sequences
    table = torch.tensor([[0, 3], [2, 1]])

    def run(sizes: list[int]) -> Tensor:
        kvs = [PagedKV.empty(4, 2, 16, dtype) for _ in layers]
        layer_stack = LayerStack(layers, kvs, rope)
        outputs, at = [], 0
        for size in sizes:
            positions = torch.arange(at, at + size).repeat(2)
            rows = Rows(positions, torch.arange(2).repeat_interleave(size), table)
            stream = tokens[:, at : at + size].reshape(-1, 64).contiguous()
            outputs.append(cpu.forward_layers(stream, layer_stack, rows)[0].view(2, size, 64))
            at += size
        return torch.cat(outputs, dim=1)

    one_by_one = run([60] + [1] * 20)
    assert torch.equal(run([60, 5, 1, 8, 2, 4]), one_by_one)
    assert torch.equal(run([80]), one_by_one)
    if path is not CpuPath.torch:
        with two_threads():
            assert torch.equal(run([60, 8, 5, 7]), one_by_one)


def test_no_rows_give_no_rows(generator):
    layers, rope = stack(generator, Activations.int8), angles(16)
    nowhere = torch.zeros(0, dtype=torch.int64)
    rows = Rows(nowhere, nowhere, torch.zeros(1, 1, dtype=torch.int64))
    kvs = [PagedKV.empty(1, 2, 16) for _ in layers]
    layer_stack = LayerStack(layers, kvs, rope)
    out, captured = cpu.forward_layers(torch.zeros(0, 64), layer_stack, rows, capture=[1])
    assert out.shape == captured[1].shape == (0, 64)
    assert cpu.argmax(torch.zeros(0, 3)).shape == (0,)
    assert bool(kvs[0].keys.isnan().all())


def test_the_stream_is_copied_where_it_enters_a_layer(generator):
    layers, rope = stack(generator, Activations.fp32), angles(16)
    rows = scattered_rows(generator, [3, 70], num_pages=4)
    stream = normal(generator, 2, 64)
    kvs = [PagedKV.empty(4, 2, 16) for _ in layers]
    for kv in kvs:
        kv.keys.zero_()
        kv.values.zero_()
    out, captured = cpu.forward_layers(
        stream, LayerStack(layers, kvs, rope), rows, capture=[0, 2, 3]
    )
    assert sorted(captured) == [0, 2, 3]
    assert torch.equal(captured[0], stream)
    assert torch.equal(captured[3], out)
    two, _ = cpu.forward_layers(stream, LayerStack(layers[:2], kvs[:2], rope), rows)
    assert torch.equal(captured[2], two)
