"""llama.cpp's layout: one GGUF file of the architecture `eagle3`, written with the package `gguf`.

llama.cpp turns neighbours where we turn halves, so rows of q and k change places; d2t holds target
ids themselves; the tokenizer is that of the target's own GGUF file. Aux layers are counted as
design.md does. It has no key for `fc_norm` and `norm_output` and would ignore them.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor

from specfit.draft_vocab import DraftVocab
from specfit.export.served import Served, needs, serve_text
from specfit.export.twins import LAYER, Frequencies, Twin, frequencies
from specfit.export.vllm import default_layers
from specfit.speculators.eagle3 import Eagle3, Eagle3Config
from specfit.targets.info import TargetInfo

NAME = "llama_cpp"
ARCHITECTURE = "eagle3"
FILE = "head.gguf"
NUM_AUX = 3
ROPE_TYPES = ("default", "linear", "llama3")  # frequencies that do not depend on the length
FACTORS = "rope_freqs.weight"
TOKENIZER = "tokenizer."
# Its names of our tensors.
NAMES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    f"{LAYER}.input_layernorm": "blk.0.attn_norm",
    f"{LAYER}.hidden_norm": "blk.0.attn_norm_2",
    f"{LAYER}.self_attn.q_proj": "blk.0.attn_q",
    f"{LAYER}.self_attn.k_proj": "blk.0.attn_k",
    f"{LAYER}.self_attn.v_proj": "blk.0.attn_v",
    f"{LAYER}.self_attn.o_proj": "blk.0.attn_output",
    f"{LAYER}.post_attention_layernorm": "blk.0.ffn_norm",
    f"{LAYER}.mlp.gate_proj": "blk.0.ffn_gate",
    f"{LAYER}.mlp.up_proj": "blk.0.ffn_up",
    f"{LAYER}.mlp.down_proj": "blk.0.ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
}


def refusal(config: Eagle3Config, served: Served) -> str | None:
    """See `Translator.refusal`."""
    if len(config.aux_layers) != NUM_AUX:
        layers = list(config.aux_layers)
        return f"speculator.aux_layers must be three layers for {NAME}, got {layers}"
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        return f"the target's rope_type must be one of {known} for {NAME}, got {kind}"
    if served.gguf is None:
        return (
            f"export.target_gguf must name the target's GGUF file for {NAME}, whose tokenizer the "
            "head's file carries, got null"
        )
    return needs({"fc_norm": config.fc_norm, "norm_output": config.norm_output}, NAME)


def write(folder: Path, head: Eagle3, vocab: DraftVocab, served: Served) -> None:
    """See `Translator.write`. Matrices are in bf16, norms in fp32.

    Raises:
        ValueError: the target's GGUF file has no tokenizer, or one of another size.
    """
    assert served.gguf is not None
    c = head.config
    writer = GGUFWriter(folder / FILE, ARCHITECTURE)
    writer.add_name(f"EAGLE-3 of {served.info.name}")
    for key, value in _sizes(c, served.info.hidden_size).items():
        writer.add_key_value(f"{ARCHITECTURE}.{key}", value, *_types(value))
    _copy_tokenizer(writer, served.gguf, c.vocab_size)
    tensors = {name: p.detach().cpu().float() for name, p in head.state_dict().items()}
    for name, num in (("q", c.num_heads), ("k", c.num_kv_heads)):
        key = f"{LAYER}.self_attn.{name}_proj.weight"
        tensors[key] = _neighbours_first(tensors[key], num)
    for ours, theirs in NAMES.items():
        if f"{ours}.weight" in tensors:
            _add(writer, f"{theirs}.weight", tensors[f"{ours}.weight"])
    rope = frequencies(c.rope_parameters, c.head_dim, c.max_position_embeddings)
    factors = _plain_frequencies(c.rope_parameters["rope_theta"], c.head_dim) / rope.inverse
    if not torch.equal(factors, torch.ones_like(factors)):
        writer.add_tensor(FACTORS, factors.numpy())
    writer.add_tensor("d2t", vocab.target_ids.cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def twin(folder: Path, _served: Served) -> Twin:
    """See `Translator.twin`."""
    values, tensors = read_gguf(folder / FILE)
    get = partial(_value, values, path=folder / FILE)
    head_dim, theta = get("attention.key_length"), get("rope.freq_base")
    inverse = _plain_frequencies(theta, head_dim) / tensors.get(FACTORS, torch.ones(1))
    ours = {theirs: name for name, theirs in NAMES.items()}
    ids = tensors.pop("d2t", None)
    return Twin(
        tensors={
            f"{ours[name.removesuffix('.weight')]}.weight": t
            for name, t in tensors.items()
            if name.removesuffix(".weight") in ours
        },
        aux_layers=tuple(get("target_layers")),
        target_ids=torch.arange(len(tensors["output.weight"])) if ids is None else ids,
        num_heads=get("attention.head_count"),
        num_kv_heads=get("attention.head_count_kv"),
        head_dim=head_dim,
        eps=get("attention.layer_norm_rms_epsilon"),
        frequencies=Frequencies(inverse),
        rotates_neighbours=True,
        norm_before_residual=values.get(f"{ARCHITECTURE}.norm_before_residual", False),
        norm_before_fc=values.get(f"{ARCHITECTURE}.norm_before_fc", False),
    )


def read_head(path: Path, info: TargetInfo) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """The sizes and flags that a file says, and its tensors as we have them.

    Raises:
        ValueError: a key is missing, or RoPE is scaled otherwise than the target's.
    """
    values, tensors = read_gguf(path)
    config = _head_config(values, tensors, path, info)
    return config, _head_tensors(tensors, config)


def _head_config(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path, info: TargetInfo
) -> Eagle3Config:
    get = partial(_value, values, path=path)
    kind = get("general.architecture", group="")
    if kind != ARCHITECTURE:
        raise ValueError(f"{path}: general.architecture must be {ARCHITECTURE}, got {kind}")
    theta = _shortest(get("rope.freq_base"))
    width, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = values.get(f"{ARCHITECTURE}.attention.key_length", width // num_heads)
    layers = values.get(f"{ARCHITECTURE}.target_layers", default_layers(info))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if FACTORS in tensors:
        # The file has frequencies and no rule that they come from; the target has one.
        rope = info.rope_parameters
        theirs = _plain_frequencies(theta, head_dim) / tensors[FACTORS]
        ours = frequencies(rope, head_dim, info.max_position_embeddings).inverse
        if not torch.allclose(theirs, ours, rtol=1e-5):
            raise ValueError(f"{path}: {FACTORS} must be those of the target's RoPE, got others")
    scaling = values.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{path}: {ARCHITECTURE}.rope.scaling.type must be none, got {scaling}")
    own_head = tensors.get("output.weight")
    return Eagle3Config(
        hidden_size=width,
        intermediate_size=get("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv"),
        head_dim=head_dim,
        vocab_size=get("vocab_size"),
        draft_vocab_size=get("vocab_size") if own_head is None else len(own_head),
        aux_layers=tuple(layers),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
        hidden_act="silu",
        rope_parameters=dict(rope),
        norm_before_residual=bool(values.get(f"{ARCHITECTURE}.norm_before_residual", False)),
        norm_before_fc=bool(values.get(f"{ARCHITECTURE}.norm_before_fc", False)),
    )


def _head_tensors(theirs: Mapping[str, Tensor], config: Eagle3Config) -> dict[str, Tensor]:
    """By our names, with q and k as we have them and d2t as offsets; factors are in `config`."""
    names = {f"{name}.weight": f"{ours}.weight" for ours, name in NAMES.items()}
    names["token_embd.weight"] = "embed_tokens.weight"
    tensors = {names.get(name, name): t for name, t in theirs.items() if name != FACTORS}
    for name, num in (("q", config.num_heads), ("k", config.num_kv_heads)):
        key = f"{LAYER}.self_attn.{name}_proj.weight"
        if key in tensors:
            tensors[key] = _halves_first(tensors[key], num)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    return tensors


def serving(served: Served, num_draft_tokens: int) -> str:
    """See `Translator.serving`."""
    target = served.gguf.name if served.gguf else "TARGET"
    return serve_text(
        f"llama-server -m {target} -md {FILE} --spec-type draft-eagle3 "
        f"--spec-draft-n-max {num_draft_tokens}",
        "Tried with llama.cpp b11434 on a CPU.",
        f"{target} is the target's own GGUF file, {FILE} the one in this folder.",
    )


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Values by key, without the tokenizer's, and tensors: floats in fp32.

    Raises:
        ValueError: it is no whole GGUF file, or a tensor holds what is no number.
    """
    if not path.is_file():
        raise ValueError(f"{path} must be a GGUF file, got none")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} must be a whole GGUF file, got {error}") from error
    names = [name for name in reader.fields if not name.startswith((TOKENIZER, "GGUF."))]
    values = {name: reader.fields[name].contents() for name in names}
    tensors = {}
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.tensor_type not in (GGMLQuantizationType.I32, GGMLQuantizationType.I64):
            data = dequantize(data, tensor.tensor_type)
        tensors[tensor.name] = torch.from_numpy(np.array(data))
        if not np.isfinite(data).all():
            raise ValueError(f"{path}: {tensor.name} must be finite, got NaN or infinity")
    return values, tensors


def _halves_first(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k as we have them, of rows as llama.cpp has them."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _neighbours_first(weight: Tensor, num_heads: int) -> Tensor:
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _sizes(c: Eagle3Config, target_hidden_size: int) -> dict[str, Any]:
    return {
        "block_count": 1,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "vocab_size": c.vocab_size,
        "target_layers": list(c.aux_layers),
        "target_hidden_size": target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
    }


def _types(value: object) -> tuple[GGUFValueType, ...]:
    match value:
        case bool():
            return (GGUFValueType.BOOL,)
        case int():
            return (GGUFValueType.UINT32,)
        case float():
            return (GGUFValueType.FLOAT32,)
        case _:
            return (GGUFValueType.ARRAY, GGUFValueType.INT32)


def _copy_tokenizer(writer: GGUFWriter, target: Path, vocab_size: int) -> None:
    reader = GGUFReader(target)
    fields = [f for name, f in reader.fields.items() if name.startswith(TOKENIZER)]
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    num_tokens = 0 if tokens is None else len(tokens.data)
    if num_tokens != vocab_size:
        raise ValueError(
            f"export.target_gguf must hold the target's {vocab_size} tokens, got {num_tokens} in "
            f"{target}"
        )
    for field in fields:
        writer.add_key_value(field.name, field.contents(), *field.types[:2])


def _add(writer: GGUFWriter, name: str, tensor: Tensor) -> None:
    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.numpy())
        return
    kind = GGMLQuantizationType.BF16
    writer.add_tensor(name, quantize(tensor.numpy(), kind), raw_dtype=kind)


def _shortest(value: float) -> float:
    """The shortest decimal that is this number in 32 bits: what was written, most likely."""
    return float(str(np.float32(value)))


def _plain_frequencies(theta: float, head_dim: int) -> Tensor:
    return frequencies({"rope_type": "default", "rope_theta": theta}, head_dim, 1).inverse


def _value(values: Mapping[str, Any], key: str, path: Path, group: str = f"{ARCHITECTURE}.") -> Any:
    name = f"{group}{key}"
    if name not in values:
        raise ValueError(f"{path}: {name} must be there, got none")
    return values[name]
