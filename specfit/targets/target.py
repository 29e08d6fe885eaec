"""A frozen target: its states, its head, its embeddings."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specfit.targets.info import TargetInfo
from specfit.targets.masks import attention_masks


@dataclass(frozen=True)
class HiddenStates:
    """What a head learns from: one conversation as the target read it."""

    input_ids: Int[Tensor, "seq"]
    loss_mask: Bool[Tensor, "seq"]  # True where the assistant speaks
    aux: Float[Tensor, "seq aux hidden"]
    last: Float[Tensor, "seq hidden"]  # before the final norm
    # Where the next token is in the loss, else 0: of the target's distribution at temperature 1,
    # the log of its normalizer and its most likely token.
    log_normalizer: Float[Tensor, "seq"]
    top_token: Int[Tensor, "seq"]


@dataclass
class _Captured:
    aux: dict[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None

    def note_aux(
        self, i: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A hook before layer `i`."""
        self.aux[i] = args[0] if args else kwargs["hidden_states"]

    def note_last(self, aux_layer: int | None, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """A hook before the final norm, whose input may count as an aux layer too."""
        self.last = args[0]
        if aux_layer is not None:
            self.aux[aux_layer] = args[0]


class Target:
    """A causal language model of transformers whose residual stream can be read."""

    def __init__(self, model: Any, tokenizer: Any, info: TargetInfo) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.info = info
        self.decoder = model.get_decoder()
        self.layers, self.final_norm = _structure(self.decoder, info)
        self.device: torch.device = model.device

    @property
    def embeddings(self) -> nn.Embedding:
        """The input embeddings, `vocab hidden`."""
        embeddings: nn.Embedding = self.model.get_input_embeddings()
        return embeddings

    @property
    def head_weight(self) -> Float[Tensor, "vocab hidden"]:
        """The rows of the language-model head."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def logits(
        self, last: Float[Tensor, "*n hidden"], weight: Float[Tensor, "draft hidden"] | None = None
    ) -> Float[Tensor, "*n draft"]:
        """What the target makes of states before its final norm, in fp32.

        Args:
            last: states as `states` gives them.
            weight: rows of `head_weight`, when not all tokens are asked for.
        """
        weight = self.head_weight if weight is None else weight
        states = self.final_norm(last.to(weight.dtype))
        return self._scaled(nn.functional.linear(states, weight).float())

    def _scaled(self, logits: Tensor) -> Tensor:
        config = self.model.config.get_text_config()
        if getattr(config, "logits_scaling", None):  # Granite
            logits = logits / config.logits_scaling
        if getattr(config, "logit_scale", None):  # Cohere
            logits = logits * config.logit_scale
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.inference_mode()
    def states(
        self,
        input_ids: Int[Tensor, "batch seq"],
        valid: Bool[Tensor, "batch seq"],
        aux_layers: list[int],
    ) -> tuple[Float[Tensor, "batch seq aux hidden"], Float[Tensor, "batch seq hidden"]]:
        """The residual stream entering `aux_layers`, and the state before the final norm.

        Padding may be on either side: positions count the valid tokens of a row, and no token
        sees a padded one, so a row's states are what they are alone. States at padded places
        mean nothing.
        """
        with self.captured(aux_layers) as found:
            self._run(input_ids, valid)
        assert found.last is not None
        if not aux_layers:
            return found.last[:, :, None][:, :, :0], found.last
        return torch.stack([found.aux[i] for i in aux_layers], dim=2), found.last

    def states_from(
        self,
        layer: int,
        entering: Float[Tensor, "batch seq hidden"],
        input_ids: Int[Tensor, "batch seq"],
        valid: Bool[Tensor, "batch seq"],
    ) -> list[Float[Tensor, "batch seq hidden"]]:
        """The residual stream of a pass that starts with `entering` at `layer`.

        What enters that layer and each after it, then the state before the final norm. Gradients
        flow, where something asks for them.
        """
        if layer == self.info.num_layers:
            return [entering]

        def enter(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            kwargs.pop("hidden_states", None)
            return (entering, *args[1:]), kwargs

        handle = self.layers[layer].register_forward_pre_hook(enter, with_kwargs=True)
        skipped = [self.layers[i] for i in range(layer)]
        for module in skipped:
            module.forward = _unchanged
        after = list(range(layer + 1, self.info.num_layers + 1))
        try:
            with self.captured(after) as found:
                self._run(input_ids, valid)
        finally:
            handle.remove()
            for module in skipped:
                del module.forward  # the class's own is back
        return [entering, *(found.aux[i] for i in after)]

    def _run(self, input_ids: Int[Tensor, "batch seq"], valid: Bool[Tensor, "batch seq"]) -> None:
        positions = (valid.cumsum(-1) - 1).clamp(min=0)
        masks = attention_masks(self.model.config, positions, positions, valid)
        self.decoder(
            input_ids=input_ids, attention_mask=masks, position_ids=positions, use_cache=False
        )

    @contextmanager
    def captured(self, aux_layers: list[int]) -> Iterator[_Captured]:
        """Collects, during the forward passes inside, the states of the latest one."""
        found = _Captured()
        top = self.info.num_layers if self.info.num_layers in aux_layers else None
        handles = [self.final_norm.register_forward_pre_hook(partial(found.note_last, top))]
        handles += [
            self.layers[i].register_forward_pre_hook(partial(found.note_aux, i), with_kwargs=True)
            for i in aux_layers
            if i < self.info.num_layers
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _unchanged(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return hidden_states


def _structure(decoder: Any, info: TargetInfo) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder layers and the norm after the last of them."""
    layers = getattr(decoder, "layers", None)
    norm = getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != info.num_layers or norm is None:
        raise ValueError(
            f"target.path: {info.architecture} is not laid out as `layers` and `norm`; its hidden "
            "states cannot be read"
        )
    return layers, norm
