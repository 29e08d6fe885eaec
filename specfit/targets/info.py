"""What a target is, read from its checkpoint."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TargetInfo:
    """A target's sizes and conventions. Nothing here is configured."""

    name: str
    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the head: what logits have, padding rows included
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: dict[str, Any]
    tied_embeddings: bool
    quantization: str | None  # the scheme of the checkpoint, None for plain weights
    dtype: str  # of the computation
    num_parameters: int
    num_active_parameters: int  # that one token runs through: of experts, those it is routed to
    bos_id: int | None
    eos_ids: list[int]  # tokens that end an answer

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def forward_flops(self, num_tokens: int, num_logits: int) -> float:
        """Operations of the products with weights: all layers for each token, the head for some.

        Attention between tokens is not counted; it is small beside them in contexts this short.
        """
        head = self.vocab_size * self.hidden_size
        layers = self.num_active_parameters - head * (1 if self.tied_embeddings else 2)
        return 2.0 * (layers * num_tokens + head * num_logits)

    @property
    def default_aux_layers(self) -> list[int]:
        """The layers whose input every engine reads by default: [2, n // 2, n - 3].

        Where these coincide, [n // 4, n // 2, n - 1]; a target of one or two layers has fewer.
        """
        n = self.num_layers
        layers = [2, n // 2, n - 3]
        if n < 5 or sorted(set(layers)) != layers:
            layers = sorted({n // 4, n // 2, n - 1})
        return layers


def read_info_file(path: Path) -> TargetInfo:
    """What `to_json` gave, from a file."""
    return TargetInfo(**json.loads(path.read_text()))


def check_aux_layers(aux_layers: list[int], info: TargetInfo) -> None:
    """Raises ValueError unless each layer is one of 0..num_layers, ascending without repeats."""
    n = info.num_layers
    if any(not 0 <= i <= n for i in aux_layers) or sorted(set(aux_layers)) != list(aux_layers):
        raise ValueError(
            f"speculator.aux_layers must ascend, without repeats, within 0..{n} "
            f"({n}: the state before the final norm), got {aux_layers}"
        )


def read_info(model: Any, *, name: str, tokenizer: Any, quantization: str | None) -> TargetInfo:
    """Reads a loaded transformers `model`.

    Raises:
        ValueError: its positions are not rotary, so that no draft layer could follow them.
    """
    config = model.config.get_text_config()
    if not getattr(config, "rope_parameters", None):
        raise ValueError(
            f"target.path must name a decoder with rotary positions, got a {type(model).__name__}"
        )
    heads = config.num_attention_heads
    return TargetInfo(
        name=name,
        architecture=(model.config.architectures or [type(model).__name__])[0],
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(config),
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        hidden_act=getattr(config, "hidden_act", None) or config.hidden_activation,
        rope_parameters=_rope_parameters(config),
        tied_embeddings=bool(model.config.tie_word_embeddings),
        quantization=quantization,
        dtype=str(model.dtype).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_active_parameters=_num_active_parameters(model, config),
        bos_id=tokenizer.bos_token_id,
        eos_ids=_eos_ids(model, tokenizer),
    )


def _num_active_parameters(model: Any, config: Any) -> int:
    routed = getattr(config, "num_experts_per_tok", None)
    total = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    share: float = routed / total if routed and total else 1.0
    experts: int = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    rest: int = sum(p.numel() for p in model.parameters()) - experts
    return rest + round(share * experts)


def _intermediate_size(config: Any) -> int:
    """Of the feed-forward layer; of all experts a token is routed to, where they have a size."""
    if getattr(config, "moe_intermediate_size", None):
        return int(config.moe_intermediate_size * config.num_experts_per_tok)
    return int(config.intermediate_size)


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Of the full-attention layers, as a draft layer can use them."""
    parameters = dict(config.rope_parameters)
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
    # Text positions are the same on all of m-rope's axes; a draft layer rotates whole heads.
    for key in ("mrope_section", "mrope_interleaved", "partial_rotary_factor"):
        parameters.pop(key, None)
    if parameters.get("rope_type") in (None, "mrope"):
        parameters["rope_type"] = "default"
    return parameters


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    ids: set[int | None] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids |= set(value) if isinstance(value, list) else {value}
    return sorted(i for i in ids if i is not None)
