"""A target's weights as the CPU kernels read them, in the numbers that its checkpoint holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from specfit.quantization.reading import input_global_scales, read_quantized, scheme_of
from specfit.targets.target import Target
from specfit_kernels.cpu_layers import MAX_HEAD_DIM, DecoderLayer, HeadNorms, Rope
from specfit_kernels.cpu_weights import Activations, CpuWeight, pack
from specfit_kernels.fp8 import FP8Tensor
from specfit_kernels.int8 import Int8Tensor
from specfit_kernels.nvfp4 import FP4Tensor
from specfit_serve.llama import LlamaWeights

Stored = FP4Tensor | FP8Tensor | Int8Tensor | Tensor
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # of which a table can be made once


def stored_weights(folder: Path) -> dict[str, Stored] | None:
    """The tensors of a checkpoint in NVFP4 or FP8, by the model's names; None if not quantized.

    Raises:
        ValueError: the kernels cannot read how it is quantized.
    """
    if scheme_of(folder) is None:
        return None
    if input_global_scales(folder):
        raise ValueError(
            f"the inputs of NVFP4 matrices must not be quantized for our kernels (W4A16), got "
            f"W4A4: {folder}; runtime.engine=torch runs this target"
        )
    return dict(read_quantized(folder))


def llama_weights(
    target: Target,
    stored: Mapping[str, Stored] | None = None,
    *,
    activations: Activations = Activations.fp32,
) -> LlamaWeights:
    """Packs a target; what is not quantized keeps its type.

    Args:
        target: loaded, on the CPU.
        stored: the checkpoint's tensors by the names of the model's parameters, those that are
            quantized as they are; None: the parameters. A head that is not among them is tied.
        activations: of the matrices in NVFP4 and INT8.

    Raises:
        ValueError: the kernels cannot run such a model; the message says what is in the way.
    """
    check_kernels(target)
    if stored is None:
        stored = {name: p.detach() for name, p in target.model.named_parameters()}
    embeddings = _plain(stored, "model.embed_tokens.weight")
    head = _matrix(stored.get("lm_head.weight", embeddings))
    return LlamaWeights(
        embeddings=embeddings,
        layers=tuple(
            _layer(stored, f"model.layers.{i}", target.info.rms_norm_eps, activations)
            for i in range(target.info.num_layers)
        ),
        norm=_vector(stored, "model.norm.weight"),
        eps=target.info.rms_norm_eps,
        head=_packed([head], activations, name="lm_head"),
        rope=rope_table(target),
        eos_ids=frozenset(target.info.eos_ids),
    )


def check_kernels(target: Target) -> None:
    """Refuses a model that the CPU kernels cannot run.

    Raises:
        ValueError: it is one.
    """
    info, config = target.info, target.model.config
    rope_type = info.rope_parameters.get("rope_type", "default")
    sizes = (info.hidden_size, info.intermediate_size, info.num_heads * info.head_dim)
    window = None if sees_everything(config) else getattr(config, "sliding_window", None)
    even = info.head_dim % 8 == 0 and info.head_dim <= MAX_HEAD_DIM
    limits = (
        (target.device.type == "cpu", "runtime.device", "be cpu", target.device.type),
        (info.model_type in MODEL_TYPES, "the model", f"be one of {MODEL_TYPES}", info.model_type),
        (info.hidden_act == "silu", "hidden_act", "be silu", info.hidden_act),
        (rope_type in ROPE_TYPES, "rope_type", f"be one of {ROPE_TYPES}", rope_type),
        (window is None, "sliding_window", "be null", window),
        (even, "head_dim", f"be 8, 16 .. {MAX_HEAD_DIM}", info.head_dim),
        (not any(size % 16 for size in sizes), "sizes", "be multiples of 16", sizes),
    )
    for holds, name, requirement, got in limits:
        if not holds:
            raise ValueError(
                f"{name} must {requirement} for the CPU kernels, got {got}; runtime.engine=torch "
                "runs this target"
            )


def sees_everything(config: Any) -> bool:
    """Whether all layers see the whole context."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return set(layer_types) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


def _layer(
    stored: Mapping[str, Stored], layer: str, eps: float, activations: Activations
) -> DecoderLayer:
    def packed(*modules: str) -> CpuWeight:
        parts = [_matrix(stored[f"{layer}.{module}.weight"]) for module in modules]
        biases = [f"{layer}.{module}.bias" for module in modules]
        bias = None
        if biases[0] in stored:
            bias = torch.cat([_vector(stored, name) for name in biases])
        return _packed(parts, activations, bias=bias, name=f"{layer}.{modules[0]}")

    def norm(module: str) -> Float32[Tensor, " size"]:
        return _vector(stored, f"{layer}.{module}.weight")

    head_norms = None
    if f"{layer}.self_attn.q_norm.weight" in stored:
        head_norms = HeadNorms(norm("self_attn.q_norm"), norm("self_attn.k_norm"), eps)
    return DecoderLayer(
        qkv=packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=packed("self_attn.o_proj"),
        gate_up=packed("mlp.gate_proj", "mlp.up_proj"),
        down=packed("mlp.down_proj"),
        input_norm=norm("input_layernorm"),
        post_attention_norm=norm("post_attention_layernorm"),
        eps=eps,
        head_norms=head_norms,
    )


def _packed(
    parts: list[Stored], activations: Activations, *, name: str, bias: Tensor | None = None
) -> CpuWeight:
    whole_numbers = all(isinstance(part, FP4Tensor | Int8Tensor) for part in parts)
    return pack(
        parts,
        activations=activations if whole_numbers else Activations.fp32,
        bias=bias,
        name=name,
    )


def _matrix(stored: Stored) -> Stored:
    """In a type that the kernels have: float16 becomes float32."""
    if isinstance(stored, Tensor) and stored.dtype is not torch.bfloat16:
        return stored.float()
    return stored


def _plain(stored: Mapping[str, Stored], name: str) -> Tensor:
    tensor = _matrix(stored[name])
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} must not be quantized for the CPU kernels, got {type(tensor).__name__}; "
            "runtime.engine=torch runs this target"
        )
    return tensor


def _vector(stored: Mapping[str, Stored], name: str) -> Float32[Tensor, " size"]:
    return _plain(stored, name).float().contiguous()


@torch.no_grad()
def rope_table(target: Target) -> Rope:
    positions = torch.arange(target.info.max_position_embeddings)[None]
    cosines, sines = target.decoder.rotary_emb(torch.empty(0), positions)
    half = target.info.head_dim // 2  # the other half is the same angles again
    return Rope(*(table[0, :, :half].float().contiguous() for table in (cosines, sines)))
