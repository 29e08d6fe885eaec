"""One target in weights of several formats: what each costs in bytes, and what it changes."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from specfit.engine import DecodeEngine
from specfit.latency.config import Format
from specfit.quantization.units import units_of
from specfit.targets.packed import Stored, llama_weights
from specfit.targets.target import Target
from specfit_kernels import fp8, int8, nvfp4
from specfit_kernels.cpu_weights import Activations
from specfit_serve.protocols import DecodeTarget


def engine_in(
    form: Format, target: Target, stored: Mapping[str, Stored] | None, activations: Activations
) -> DecodeEngine:
    """The kernels over the target in one format.

    Args:
        form: what its matrices become.
        target: in memory.
        stored: the tensors of its checkpoint if that is quantized: in NVFP4 it stays as it is.
        activations: of the matrices in NVFP4 and INT8; heads are in INT8 where it is int8.

    Raises:
        ValueError: the kernels cannot run the target.
    """
    dtype = torch.float32 if form is Format.fp32 else torch.bfloat16
    parameters = target.model.named_parameters()
    tensors: dict[str, Stored] = {name: p.detach().to(dtype) for name, p in parameters}
    if form in (Format.fp8, Format.nvfp4):
        own = stored if form is Format.nvfp4 else None
        tensors |= _quantized(form, target) if own is None else own
        head = target.head_weight.detach()
        tensors["lm_head.weight"] = int8.quantize(head, name="lm_head")
    weights = llama_weights(target, tensors, activations=activations)
    return DecodeEngine(target, weights, heads_in_int8=activations is Activations.int8)


def _quantized(form: Format, target: Target) -> dict[str, Stored]:
    parameters = dict(target.model.named_parameters())
    names = [name for unit in units_of(parameters).values() for name in unit]
    found: dict[str, Stored] = {}
    for name in tqdm(names, unit="matrix", desc=f"bench: {form.value}"):
        weight = parameters[name].detach()
        quantize = fp8.quantize_blocks if form is Format.fp8 else nvfp4.quantize
        found[name] = quantize(weight, name=name)
    return found


def divergence(
    reference: DecodeTarget, other: DecodeTarget, texts: list[tuple[list[int], list[int]]]
) -> tuple[float, float]:
    """Mean KL in nats from the reference, and how often the most likely token is the same.

    Args:
        reference: the target as it is.
        other: of another format.
        texts: prompts, and the answers on whose tokens both are compared.
    """
    kls: list[Tensor] = []
    same: list[Tensor] = []
    for prompt, answer in texts:
        logs = [_log_probs(target, prompt, answer) for target in (reference, other)]
        kls.append(functional.kl_div(logs[1], logs[0], reduction="none", log_target=True).sum(-1))
        same.append(logs[0].argmax(-1) == logs[1].argmax(-1))
    return float(torch.cat(kls).mean()), float(torch.cat(same).float().mean())


def _log_probs(
    target: DecodeTarget, prompt: list[int], answer: list[int]
) -> Float[Tensor, "answer vocab"]:
    tokens: Int[Tensor, "1 seq"] = torch.tensor([prompt + answer[:-1]])
    logits = target.forward(tokens, torch.zeros(1, dtype=torch.long), 0).logits[0]
    target.release(0)
    return logits[len(prompt) - 1 :].double().log_softmax(-1)
