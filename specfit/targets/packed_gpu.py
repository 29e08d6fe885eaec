"""A target's weights as the Triton kernels read them: NVFP4 as its checkpoint has it, and bf16."""

from collections.abc import Mapping

import torch
from jaxtyping import BFloat16, Float32
from torch import Tensor

from specfit.targets.packed import MODEL_TYPES, ROPE_TYPES, Stored, rope_table, sees_everything
from specfit.targets.target import Target
from specfit_kernels import nvfp4, support
from specfit_kernels.layer_twins import HeadNorms, Rope
from specfit_kernels.linear_twins import tiled, worded
from specfit_kernels.nvfp4 import FP4Tensor
from specfit_kernels.support import Kernel
from specfit_serve.gpu_weights import GpuLayer, GpuWeights, Matrix

HEAD_DIMS = (64, 128)
MAX_HIDDEN = 8192  # what a norm's program keeps in registers
DEFAULT_TERMS = 3  # as exact as float16: a W4A16 checkpoint's numbers, and no slower than one
_IN_TERMS = (Kernel.skinny_w4a4, Kernel.gemm_w4a4)
_IN_HALVES = (Kernel.gemv_w4a16, Kernel.gemm_w4a16)


def gpu_weights(
    target: Target,
    stored: Mapping[str, Stored] | None = None,
    *,
    num_terms: int | None = None,
    quantize: bool = False,
) -> GpuWeights:
    """Packs a target, on its device.

    Args:
        target: loaded.
        stored: as `llama_weights` takes it.
        num_terms: NVFP4 terms of a token, 1 to 3, on tensor cores that multiply NVFP4 with NVFP4;
            0: weights become float16 on the way to others. None: 3 where there are such, else 0.
        quantize: the layers' matrices that are not quantized become NVFP4, and embeddings and head
            bfloat16; otherwise they must be that already.

    Raises:
        ValueError: the kernels cannot run such a model; the message says what is in the way.
    """
    if num_terms is None:
        num_terms = DEFAULT_TERMS if Kernel.skinny_w4a4 in support.runnable(target.device) else 0
    _check(target, num_terms)
    if stored is None:
        stored = {name: p.detach() for name, p in target.model.named_parameters()}
    pack = _Packer(stored, target.device, num_terms, quantize)
    embeddings = pack.bfloat16("model.embed_tokens.weight")
    is_tied = "lm_head.weight" not in stored
    rope = rope_table(target)
    return GpuWeights(
        embeddings=embeddings,
        layers=tuple(
            pack.layer(f"model.layers.{i}", target.info.rms_norm_eps)
            for i in range(target.info.num_layers)
        ),
        norm=pack.vector("model.norm.weight"),
        eps=target.info.rms_norm_eps,
        head=embeddings if is_tied else pack.bfloat16("lm_head.weight"),
        rope=Rope(rope.cosines.to(target.device), rope.sines.to(target.device)),
        eos_ids=frozenset(target.info.eos_ids),
        num_terms=num_terms,
    )


def _check(target: Target, num_terms: int) -> None:
    info, config = target.info, target.model.config
    rope_type = info.rope_parameters.get("rope_type", "default")
    sizes = (info.hidden_size, info.intermediate_size, info.num_heads * info.head_dim)
    window = None if sees_everything(config) else getattr(config, "sliding_window", None)
    can = support.runnable(target.device)
    needed = _IN_TERMS if num_terms else _IN_HALVES
    lacking = [kernel.value for kernel in needed if kernel not in can]
    limits = (
        (num_terms in range(4), "num_terms", "be 0 to 3", num_terms),
        (not lacking, "runtime.device", f"run {', '.join(lacking)}", str(target.device)),
        (info.model_type in MODEL_TYPES, "the model", f"be one of {MODEL_TYPES}", info.model_type),
        (info.hidden_act == "silu", "hidden_act", "be silu", info.hidden_act),
        (rope_type in ROPE_TYPES, "rope_type", f"be one of {ROPE_TYPES}", rope_type),
        (window is None, "sliding_window", "be null", window),
        (info.head_dim in HEAD_DIMS, "head_dim", f"be one of {HEAD_DIMS}", info.head_dim),
        (not any(size % 16 for size in sizes), "sizes", "be multiples of 16", sizes),
        (sizes[0] <= MAX_HIDDEN, "hidden_size", f"be at most {MAX_HIDDEN}", sizes[0]),
    )
    for holds, name, requirement, got in limits:
        if not holds:
            raise _refused(name, requirement, got)


def _refused(name: str, requirement: str, got: object) -> ValueError:
    return ValueError(
        f"{name} must {requirement} for the GPU kernels, got {got}; runtime.engine=torch runs this "
        "target"
    )


class _Packer:
    """Takes tensors by their names."""

    def __init__(
        self, stored: Mapping[str, Stored], device: torch.device, num_terms: int, quantize: bool
    ) -> None:
        self.stored = stored
        self.device = device
        self.num_terms = num_terms
        self.quantize = quantize

    def layer(self, layer: str, eps: float) -> GpuLayer:
        """All of a layer."""
        head_norms, bias = None, None
        if f"{layer}.self_attn.q_norm.weight" in self.stored:
            queries, keys = (self.vector(f"{layer}.self_attn.{one}_norm.weight") for one in "qk")
            head_norms = HeadNorms(queries, keys, eps)
        if f"{layer}.self_attn.q_proj.bias" in self.stored:
            bias = torch.cat([self.vector(f"{layer}.self_attn.{one}_proj.bias") for one in "qkv"])
        for module in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            if f"{layer}.{module}.bias" in self.stored:
                raise _refused(f"{layer}.{module}", "have no bias", "one")
        return GpuLayer(
            qkv=self.matrix(*(f"{layer}.self_attn.{one}_proj" for one in "qkv")),
            o=self.matrix(f"{layer}.self_attn.o_proj"),
            gate_up=self.matrix(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
            down=self.matrix(f"{layer}.mlp.down_proj"),
            input_norm=self.vector(f"{layer}.input_layernorm.weight"),
            post_attention_norm=self.vector(f"{layer}.post_attention_layernorm.weight"),
            eps=eps,
            qkv_bias=bias,
            head_norms=head_norms,
        )

    def matrix(self, *modules: str) -> Matrix:
        """Modules one below another."""
        parts = [self.quantized(f"{module}.weight") for module in modules]
        return tiled(parts) if self.num_terms else worded(parts)

    def quantized(self, name: str) -> FP4Tensor:
        """One of a layer's matrices, on the device."""
        found = self.stored[name]
        if isinstance(found, Tensor) and self.quantize:
            return nvfp4.quantize(found.to(self.device), name=name)
        if not isinstance(found, FP4Tensor):
            kind = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
            raise _refused(name, "be in NVFP4", kind)
        return FP4Tensor(
            found.codes.to(self.device),
            found.block_scales.to(self.device),
            found.global_scale.to(self.device),
            found.divides,
            found.columns,
        )

    def bfloat16(self, name: str) -> BFloat16[Tensor, "rows columns"]:
        """Embeddings, or a head."""
        found = self.stored[name]
        if not isinstance(found, Tensor):
            raise _refused(name, "not be quantized", type(found).__name__)
        rounded = found.to(self.device, torch.bfloat16).contiguous()
        # A model whose numbers are bfloat16 may have been loaded in another type.
        if not self.quantize and not torch.equal(rounded.to(found.device, found.dtype), found):
            raise _refused(name, "be in bfloat16", str(found.dtype))
        return rounded

    def vector(self, name: str) -> Float32[Tensor, " size"]:
        """A norm, or a bias."""
        found = self.stored[name]
        assert isinstance(found, Tensor)
        return found.to(self.device, torch.float32).contiguous()
