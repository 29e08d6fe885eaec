"""Which engine decodes, and that its answers are those of transformers."""

import logging
from pathlib import Path

import pytest
import torch
from sharded_targets import plan_of, w4a4, write_sharded, written
from tiny_architectures import random_tokens, tiny
from tiny_heads import make_speculator

from specfit.config import Engine, TargetConfig
from specfit.engine import DecodeEngine, decode_engine
from specfit.quantization.config import Precision
from specfit.speculators.proposer import Eagle3Proposer
from specfit.targets.load import load
from specfit.targets.locate import locate
from specfit.targets.packed import llama_weights
from specfit.targets.slots import SlotTarget
from specfit_kernels import cpu_build, fp8
from specfit_kernels.cpu_weights import WeightFormat
from specfit_serve import eagle3
from specfit_serve.decode import DecodeSettings, Request, decode
from specfit_serve.llama import LlamaTarget
from specfit_serve.ngram import NoProposer

ROOM = {"num_slots": 3, "max_length": 100, "aux_layers": None}
SETTINGS = DecodeSettings(num_draft_tokens=0, max_new_tokens=20, batch_size=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_sharded(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(checkpoint, tmp_path_factory) -> Path:
    return written(checkpoint, tmp_path_factory.mktemp("nvfp4"), plan_of(checkpoint))


def opened(folder: Path, tmp_path: Path, name: Engine) -> DecodeEngine:
    config = TargetConfig(path=str(folder))
    location = locate(config, digests=tmp_path / "digests.json", download=False)
    return decode_engine(name, load(config, location, torch.device("cpu")), folder)


def answers(engine: DecodeEngine) -> dict[str, list[int]]:
    requests = [Request(str(i), random_tokens(9 + i, seed=i).tolist(), 0.0) for i in range(4)]
    found = decode(engine.slots(**ROOM), NoProposer(), requests, SETTINGS)
    return {answer.id: answer.tokens for answer in found}


def test_quantized_matrices_stay_as_they_are_and_answers_are_those_of_transformers(
    quantized, tmp_path
):
    kernels, torchs = (opened(quantized, tmp_path, name) for name in (Engine.auto, Engine.torch))
    assert isinstance(kernels.slots(**ROOM), LlamaTarget)
    assert isinstance(torchs.slots(**ROOM), SlotTarget)
    assert {layer.down.format for layer in kernels.weights.layers} == {WeightFormat.nvfp4}
    assert answers(kernels) == answers(torchs)


@pytest.mark.parametrize("precision", [Precision.fp8, Precision.fp8_block])
def test_fp8_matrices_are_read_too(checkpoint, tmp_path, precision):
    folder = written(checkpoint, tmp_path / "fp8", plan_of(checkpoint, precision))
    kernels, torchs = (opened(folder, tmp_path, name) for name in (Engine.fp4, Engine.torch))
    assert {layer.qkv.format for layer in kernels.weights.layers} == {WeightFormat.fp8}
    assert answers(kernels) == answers(torchs)


def test_a_target_that_is_not_quantized_keeps_its_numbers(checkpoint, tmp_path):
    kernels, torchs = (opened(checkpoint, tmp_path, name) for name in (Engine.fp4, Engine.torch))
    assert {layer.o.format for layer in kernels.weights.layers} == {WeightFormat.fp32}
    assert answers(kernels) == answers(torchs)


def test_what_the_kernels_cannot_run_is_left_to_transformers_or_refused(
    checkpoint, tmp_path, caplog
):
    folder = written(checkpoint, tmp_path / "w4a4", w4a4(checkpoint, plan_of(checkpoint)))
    with caplog.at_level(logging.INFO):
        engine = opened(folder, tmp_path, Engine.auto)
    assert engine.weights is None
    assert "W4A4" in caplog.text
    with pytest.raises(ValueError, match=r"W4A16.*got W4A4.*runtime\.engine=torch"):
        opened(folder, tmp_path, Engine.fp4)


def test_a_mixture_of_experts_is_named(checkpoint):
    assert decode_engine(Engine.auto, tiny("qwen3_moe"), checkpoint).weights is None
    with pytest.raises(ValueError, match=r"the model must be one of.*got qwen3_moe"):
        decode_engine(Engine.fp4, tiny("qwen3_moe"), checkpoint)


def test_a_quantized_head_is_run_and_quantized_embeddings_are_named():
    target = tiny("qwen3")
    stored = {name: p.detach() for name, p in target.model.named_parameters()}
    head = fp8.quantize_tensor(stored["lm_head.weight"])
    weights = llama_weights(target, stored | {"lm_head.weight": head})
    assert weights.head.format is WeightFormat.fp8
    embeddings = fp8.quantize_tensor(stored["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight must not be quantized"):
        llama_weights(target, stored | {"model.embed_tokens.weight": embeddings})


def test_without_a_compiler_transformers_is_quicker_than_twins(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(cpu_build, "paths", lambda: [cpu_build.CpuPath.torch])
    with caplog.at_level(logging.INFO):
        assert decode_engine(Engine.auto, tiny("llama"), checkpoint).weights is None
    assert "not compiled" in caplog.text
    assert decode_engine(Engine.fp4, tiny("llama"), checkpoint).weights is not None


def test_heads_run_where_their_target_does(checkpoint):
    made = make_speculator(tiny("llama"))
    room = {"num_slots": 2, "max_length": 50}
    for name, kind in ((Engine.torch, Eagle3Proposer), (Engine.fp4, eagle3.Eagle3Proposer)):
        engine = decode_engine(name, made.target, checkpoint)
        assert isinstance(engine.eagle3(made.head, made.vocab, **room), kind)
