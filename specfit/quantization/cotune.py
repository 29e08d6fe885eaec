"""Co-tuning: a factor on the scale of each quantized matrix, learned on KL.

The codes stay, and so do bytes and speed; matrices that engines fuse have one factor. What is
learned on the calibration text is kept only where it lowers KL on the selection text.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm import tqdm

from specfit.quantization.divergence import ModelDivergence
from specfit.quantization.measured import Text

LR = 2e-3  # of the logarithms of the factors
EPOCHS = 8

log = logging.getLogger(__name__)


def cotune(divergence: ModelDivergence, chosen: Bool[Tensor, "units"]) -> dict[str, float]:
    """Factors by tensor name, for `requantize`; empty when none lower the divergence.

    All units must be of linear layers. A killed run begins again: nothing is kept of its epochs.
    """
    switch = divergence.switch
    units = divergence.units(chosen)
    groups = switch.groups(units)
    factors = torch.zeros(len(groups), requires_grad=True)
    optimizer = torch.optim.Adam([factors], lr=LR)
    best = first = float(divergence.kl(chosen, Text.selection).mean())
    kept = torch.zeros(len(groups))
    with _scaled(divergence.target.model, groups, factors):
        for epoch in tqdm(range(EPOCHS), unit="epoch", desc="quantize: co-tune"):
            for batch in range(divergence.num_batches(Text.calibration)):
                optimizer.zero_grad()
                divergence.loss(units, Text.calibration, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            divergence.forget()
            kl = float(divergence.kl(chosen, Text.selection).mean())
            log.info(
                "quantize: co-tuning epoch %d: KL %.5f nats, %.5f before", epoch + 1, kl, first
            )
            if kl >= best:
                break
            best, kept = kl, factors.detach().clone()
    divergence.forget()
    if best == first:
        return {}
    values = kept.exp().tolist()
    return {name: value for group, value in zip(groups, values, strict=True) for name in group}


@contextmanager
def _scaled(
    model: nn.Module, groups: Sequence[Sequence[str]], log_factors: Float[Tensor, "groups"]
) -> Iterator[None]:
    """Multiplies what the weights of each group contribute to their module's output."""
    handles = []
    for i, group in enumerate(groups):
        for name in group:
            module = model.get_submodule(name.removesuffix(".weight"))
            handles.append(module.register_forward_hook(partial(_scale, log_factors, i)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scale(
    log_factors: Float[Tensor, "groups"],
    i: int,
    module: nn.Linear,
    _args: tuple[Any, ...],
    output: Tensor,
) -> Tensor:
    factor = log_factors[i].exp().to(output)
    return output * factor if module.bias is None else (output - module.bias) * factor + module.bias
