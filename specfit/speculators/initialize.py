"""What a head starts from."""

import logging
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specfit.config import Init, SpeculatorConfig
from specfit.draft_vocab import DraftVocab
from specfit.speculators.eagle3 import Eagle3, Eagle3Config
from specfit.targets.info import TargetInfo, check_aux_layers
from specfit.targets.target import Target

log = logging.getLogger(__name__)


def aux_layers_of(config: SpeculatorConfig, info: TargetInfo) -> list[int]:
    """The layers a head reads: the configured ones, checked, or the target's default."""
    if config.aux_layers is None:
        return info.default_aux_layers
    check_aux_layers(config.aux_layers, info)
    return list(config.aux_layers)


def head_config(config: SpeculatorConfig, info: TargetInfo) -> Eagle3Config:
    """A head with the target's own sizes, RoPE and context."""
    if config.draft_vocab_size > info.vocab_size:
        raise ValueError(
            "speculator.draft_vocab_size must be at most the target's vocabulary of "
            f"{info.vocab_size}, got {config.draft_vocab_size}"
        )
    return Eagle3Config(
        hidden_size=info.hidden_size,
        intermediate_size=info.intermediate_size,
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        vocab_size=info.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        aux_layers=tuple(aux_layers_of(config, info)),
        max_position_embeddings=info.max_position_embeddings,
        rms_norm_eps=info.rms_norm_eps,
        hidden_act="silu",  # of every engine's EAGLE-3 layer, whatever the target has
        rope_parameters=info.rope_parameters,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )


@torch.no_grad()
def initialize(head: Eagle3, target: Target, vocab: DraftVocab, init: Init, seed: int) -> None:
    """Fills `head`: at random, then with what the target's last layer and head can give.

    The layer's projections read the fused state as the target's read theirs, and nothing yet of
    the embedding; `fc` averages the aux states; `lm_head` has the target's rows. What a target
    does not have in this form (experts, projections in one) stays random and is logged.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    if init is Init.random:
        return
    width = head.config.hidden_size
    num_aux = len(head.config.aux_layers)
    head.fc.weight.copy_(torch.eye(width).repeat(1, num_aux) / num_aux)
    head.lm_head.weight.copy_(target.head_weight[vocab.target_ids.to(target.device)])
    head.norm.weight.copy_(effective_weight(target.final_norm, width))
    last = target.layers[-1]
    layer = head.layer
    _copy_norm(layer.hidden_norm, last, "input_layernorm", width)
    _copy_norm(layer.input_layernorm, target.layers[0], "input_layernorm", width)
    _copy_norm(layer.post_attention_layernorm, last, "post_attention_layernorm", width)
    for name in ("q_proj", "k_proj", "v_proj"):
        projection: nn.Linear = getattr(layer.self_attn, name)
        weight = _weight_of(last, f"self_attn.{name}", (projection.out_features, width))
        if weight is not None:
            projection.weight.copy_(torch.cat([torch.zeros_like(weight), weight], dim=1))
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        weight = _weight_of(last, name, tuple(linear.weight.shape))
        if weight is not None:
            linear.weight.copy_(weight)


@torch.no_grad()
def effective_weight(norm: nn.Module, width: int) -> Float[Tensor, "hidden"]:
    """What a norm multiplies with, however it keeps that (Gemma keeps weight - 1)."""
    like: Any = next(norm.parameters())
    ones = torch.ones(1, width, dtype=like.dtype, device=like.device)
    found: Tensor = norm(ones)[0].float()
    return found


def _copy_norm(to: nn.Module, layer: nn.Module, name: str, width: int) -> None:
    norm = getattr(layer, name, None)
    if norm is None:
        log.info("speculator: the target's layers have no %s; it starts at one", name)
    else:
        to.weight.copy_(effective_weight(norm, width))  # type: ignore[operator]


def _weight_of(layer: nn.Module, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """A projection as a plain matrix, also where the target keeps it quantized."""
    try:
        module = layer.get_submodule(name)
    except AttributeError:
        module = None
    weight = getattr(module, "weight", None)
    if weight is None or tuple(weight.shape) != shape or not weight.is_floating_point():
        log.info("speculator: no %s of %s in the target's last layer; random", name, shape)
        return None
    found: Tensor = weight.float()
    return found
