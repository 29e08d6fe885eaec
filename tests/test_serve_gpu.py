"""Targets on a GPU's kernels as far as no GPU is needed: packing, refusals, what is launched.

What they compute is tested in interpreted_gpu_target.py, and on a device in test_gpu.py.
"""

from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu_device import by_twins
from tiny_architectures import random_tokens, tiny
from tiny_targets import CONFIGS
from transformers import AutoModelForCausalLM
from triton_harness import SHARED_KIB, compiled

from specfit.config import Engine
from specfit.engine import decode_engine
from specfit.targets.info import read_info
from specfit.targets.packed import llama_weights
from specfit.targets.packed_gpu import gpu_weights
from specfit.targets.target import Target
from specfit_kernels import fp8, support
from specfit_kernels.kv_pages import KVPages, Places
from specfit_kernels.layer_twins import Rope
from specfit_kernels.linear_twins import TiledWeight, WordWeight
from specfit_kernels.nvfp4 import quantize
from specfit_kernels.skinny_bf16 import skinny_bf16
from specfit_serve.gpu_layers import Buffers, Pass, forward_layers
from specfit_serve.gpu_weights import GpuLayer, GpuWeights
from specfit_serve.llama import LlamaTarget

META = torch.device("meta")


def target_of(architecture: str, **sizes: Any) -> Target:
    """Tiny, in bfloat16, with heads as wide as the kernels take them."""
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[architecture])
    for name, value in ({"head_dim": 64} | sizes).items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=1)
    info = read_info(
        model.requires_grad_(False), name=architecture, tokenizer=tokenizer, quantization=None
    )
    return Target(model, tokenizer, info)


def stored_of(target: Target) -> dict[str, Any]:
    return {
        name: quantize(p) if name.endswith("_proj.weight") else p
        for name, p in target.model.named_parameters()
    }


@pytest.fixture
def _can_all(monkeypatch):
    monkeypatch.setattr(support, "runnable", lambda _: frozenset(support.Kernel))


@pytest.mark.usefixtures("_can_all")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("num_terms", [0, 2, None])
def test_matrices_keep_their_numbers(architecture, num_terms):
    target = target_of(architecture)
    stored = stored_of(target)
    packed = gpu_weights(target, stored, num_terms=num_terms)
    assert packed.num_terms == (3 if num_terms is None else num_terms)
    assert (packed.num_heads, packed.num_kv_heads, packed.head_dim) == (4, 2, 64)
    for i, layer in enumerate(packed.layers):
        for matrix, names in (
            (layer.qkv, ("self_attn.q", "self_attn.k", "self_attn.v")),
            (layer.o, ("self_attn.o",)),
            (layer.gate_up, ("mlp.gate", "mlp.up")),
            (layer.down, ("mlp.down",)),
        ):
            parts = [stored[f"model.layers.{i}.{name}_proj.weight"] for name in names]
            values = (matrix.values() * matrix.row_scales[:, None])[:, : matrix.columns]
            expected = torch.cat([part.dequantize() for part in parts])
            # The global scale divides in one and its inverse multiplies in the other.
            torch.testing.assert_close(values, expected, rtol=2.0**-22, atol=0)
    assert (layer.head_norms is None) == (architecture == "llama")
    assert (packed.head is packed.embeddings) == (architecture == "llama")
    assert torch.equal(packed.embeddings, target.embeddings.weight)


@pytest.mark.usefixtures("_can_all")
@pytest.mark.parametrize("architecture", ["llama", "llama3_rope", "yarn_rope", "qwen3"])
def test_a_target_of_twins_gives_the_logits_of_the_cpu_kernels(architecture):
    from specfit_serve.gpu import GpuTarget

    target = target_of(architecture, initializer_range=0.15)
    stored = stored_of(target)
    room = {"num_slots": 3, "max_length": 200, "aux_layers": [0, 3, 6]}
    reference = LlamaTarget(llama_weights(target, stored), **room, kv_dtype=torch.bfloat16)
    twins = GpuTarget(gpu_weights(target, stored, num_terms=0), **room)
    with by_twins():
        for slot, length in enumerate((120, 3, 63)):
            prompt = random_tokens(1, length, seed=slot)
            for one in (reference, twins):
                one.forward(prompt, torch.tensor([0]), slot, last_only=True)
        draft, starts = random_tokens(3, 5), torch.tensor([120, 3, 63])
        expected, found = (one.forward(draft, starts, 0) for one in (reference, twins))
    for name in ("logits", "features"):
        error = getattr(found, name) - getattr(expected, name)
        # float16 alone would be 2e-4 a product; see interpreted_gpu_target.py.
        assert float(error.norm() / getattr(expected, name).norm()) < 5e-3


@pytest.mark.usefixtures("_can_all")
def test_what_is_not_quantized_becomes_so_only_when_asked():
    target = target_of("llama")
    message = r"layers\.0\.self_attn\.q_proj\.weight must be in NVFP4 .* got torch\.bfloat16; runti"
    with pytest.raises(ValueError, match=message):
        gpu_weights(target)
    asked = gpu_weights(target, quantize=True, num_terms=0)
    given = gpu_weights(target, stored_of(target), num_terms=0)
    for one, other in zip(asked.layers, given.layers, strict=True):
        assert torch.equal(one.gate_up.words, other.gate_up.words)
        assert torch.equal(one.qkv.row_scales, other.qkv.row_scales)


@pytest.mark.usefixtures("_can_all")
def test_numbers_that_would_change_are_refused():
    target = target_of("qwen3")
    stored = stored_of(target)
    down = "model.layers.1.mlp.down_proj.weight"
    head = target.head_weight.float()
    in_float32 = gpu_weights(target, stored | {"lm_head.weight": head})
    assert torch.equal(in_float32.head, target.head_weight)
    for name, value, message in (
        (down, fp8.quantize_tensor(target.head_weight), "must be in NVFP4 .* got FP8Tensor"),
        ("lm_head.weight", head * 1.001, "must be in bfloat16 .* got torch.float32"),
        ("lm_head.weight", quantize(head), "must not be quantized .* got FP4Tensor"),
        ("model.layers.0.self_attn.o_proj.bias", head[0], "must have no bias"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            gpu_weights(target, stored | {name: value})
        assert name.removesuffix(".weight").removesuffix(".bias") in str(error.value)
        assert "runtime.engine=torch" in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen3_moe", {}, "the model must be one of .* got qwen3_moe"),
        ("llama", {"head_dim": 16}, r"head_dim must be one of \(64, 128\) .* got 16"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("llama", {"intermediate_size": 40}, r"sizes must be multiples of 16 .*\(32, 40, 256\)"),
    ],
)
@pytest.mark.usefixtures("_can_all")
def test_a_model_that_the_kernels_cannot_run_is_refused(architecture, changes, message):
    with pytest.raises(ValueError, match=rf"{message}.*runtime\.engine=torch"):
        gpu_weights(target_of(architecture, **changes))


def test_a_device_that_lacks_the_kernels_is_refused(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    target = copy(tiny("llama"))
    target.device = torch.device("cuda")
    monkeypatch.setattr(support, "runnable", lambda _: frozenset())
    lacking = r"runtime\.device must run gemv_w4a16, gemm_w4a16 .* got cuda; runtime\.engine=torch"
    with pytest.raises(ValueError, match=lacking):
        decode_engine(Engine.fp4, target, tmp_path)
    can = frozenset(support.Kernel) - {support.Kernel.skinny_w4a4, support.Kernel.gemm_w4a4}
    monkeypatch.setattr(support, "runnable", lambda _: can)
    with pytest.raises(ValueError, match="must run skinny_w4a4, gemm_w4a4"):
        gpu_weights(target, num_terms=3)
    with pytest.raises(ValueError, match="num_terms must be 0 to 3"):
        gpu_weights(target, num_terms=4)
    assert decode_engine(Engine.auto, target, tmp_path).weights is None


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def geometry(num_terms: int, num_layers: int = 2) -> GpuWeights:
    """Llama 3.1 8B's, but for the number of layers; nothing is in memory."""

    def matrix(rows: int, columns: int):
        sizes = {"row_scales": empty(rows), "columns": columns}
        if num_terms == 0:
            words = empty(rows, columns // 8, dtype=torch.int32)
            return WordWeight(words, empty(rows, columns // 16, dtype=torch.uint8), **sizes)
        tiles = empty(rows // 128, columns // 64, 512, dtype=torch.float8_e4m3fn)
        return TiledWeight(empty(rows, columns // 2, dtype=torch.uint8), tiles, **sizes)

    layer = GpuLayer(
        qkv=matrix(6144, 4096),
        o=matrix(4096, 4096),
        gate_up=matrix(28672, 4096),
        down=matrix(4096, 14336),
        input_norm=empty(4096),
        post_attention_norm=empty(4096),
        eps=1e-5,
    )
    embeddings = empty(128256, 4096, dtype=torch.bfloat16)
    return GpuWeights(
        embeddings=embeddings,
        layers=(layer,) * num_layers,
        norm=empty(4096),
        eps=1e-5,
        head=embeddings,
        rope=Rope(empty(8192, 64), empty(8192, 64)),
        eos_ids=frozenset(),
        num_terms=num_terms,
    )


Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def launched(
    weights: GpuWeights, rows: int, each: int, *, is_prompt: bool = False, arch: int = 90
) -> list[Launch]:
    """What a pass launches: kernels, their arguments and options."""
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def record(kernel: Any, *args: Any, **options: Any) -> None:
        found.append((kernel, args, options))

    num_tokens = rows * each
    sizes = {"num_aux": 1, "max_length": 2048, "is_prompt": is_prompt}
    buffers = Buffers.empty(weights, num_tokens, **sizes).first(num_tokens)
    numbers = [empty(num_tokens, dtype=torch.int32) for _ in range(2)]
    places = Places(*numbers, empty(rows, 32, dtype=torch.int32))
    kv = [KVPages.empty(64, weights.num_kv_heads, weights.head_dim, META)] * len(weights.layers)
    work = Pass(places, each, buffers, [1], is_prompt, pdl=not is_prompt)
    with (
        patch.object(JITFunction, "run", record),
        patch.object(support, "require"),
        patch.object(support, "architecture", return_value=arch),
    ):
        forward_layers(weights, kv, work)
        logits = empty(num_tokens, len(weights.head))
        skinny_bf16(weights.head, buffers.normed, logits, pdl=not is_prompt)
    return found


def names(launches: list[Launch]) -> list[str]:
    return [kernel.__name__.removeprefix("_") for kernel, _, _ in launches]


@pytest.mark.parametrize(("num_terms", "product"), [(0, "gemv_w4a16"), (3, "skinny_w4a4")])
def test_a_layer_is_ten_launches_that_overlap(num_terms, product):
    found = launched(geometry(num_terms), 1, 5)
    attention = ["rope_append", "attn_verify", "attn_combine"]
    after = ["rmsnorm_quant", product, "silu_mul_quant", product]
    layer = ["rmsnorm_quant", product, *attention, product, *after]
    assert names(found) == [*layer, *layer, "rmsnorm_quant", "skinny_bf16"]
    # The launch before the first is torch's.
    overlap = [options["launch_pdl"] for _, _, options in found]
    assert overlap == [False] + [True] * (len(found) - 1)


def test_many_drafts_and_long_prompts_are_attended_to_in_parts():
    weights = geometry(0, num_layers=1)
    drafts = launched(weights, 60, 3)
    prompt = launched(weights, 1, 300, is_prompt=True)
    parts = [names(found).count("attn_verify") for found in (drafts, prompt)]
    assert parts == [2, 3]  # 126 + 54, and 128 + 128 + 44 tokens
    assert not any(options.get("launch_pdl") for _, _, options in prompt)
    assert names(prompt).count("gemm_w4a16") == 4


@pytest.mark.slow
@pytest.mark.parametrize(("num_terms", "arch"), [(0, 90), (3, 100), (3, 120)])
@pytest.mark.parametrize(("is_prompt", "each"), [(False, 1), (False, 5), (True, 40)])
def test_all_that_a_pass_launches_compiles_without_spills(num_terms, arch, is_prompt, each):
    found = launched(geometry(num_terms), 1, each, is_prompt=is_prompt, arch=arch)
    for kernel, args, options in {str(one): one for one in found}.values():
        result = compiled(lambda k=kernel, a=args, o=options: k.run(*a, **o), arch)
        assert result.spills == 0, kernel.__name__
        assert result.shared_bytes <= SHARED_KIB[arch] * 1024
