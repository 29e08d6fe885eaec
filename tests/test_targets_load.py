"""A checkpoint is loaded as it is, or refused in one line that says what is wrong with it."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import CONFIGS, write_target

from specfit.config import TargetConfig
from specfit.targets.load import check_gguf, load
from specfit.targets.locate import locate
from specfit.targets.target import Target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("qwen3") / "model", "qwen3")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory) -> bytes:
    """A small file of some values and two tensors, which ends with the last of them."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("text", "some text")
    writer.add_array("list", ["one", "two"])
    writer.add_tensor("a", np.arange(64, dtype=np.float16).reshape(2, 32))
    writer.add_tensor("b", np.ones((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def opened(path: Path, **config: object) -> Target:
    target = TargetConfig(path=str(path), **config)
    return load(target, locate(target), torch.device("cpu"))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


BROKEN: dict[str, Callable[[Path], object]] = {
    "weights cut short": lambda folder: cut(folder / "model.safetensors", 20000),
    "empty weights": lambda folder: cut(folder / "model.safetensors", 0),
    "no tensor of the head": lambda folder: change_tensors(
        folder, lambda t: t.pop("lm_head.weight")
    ),
    "more layers than weights": lambda folder: change_config(
        folder, num_hidden_layers=8, layer_types=["full_attention"] * 8
    ),
    "sizes unlike the weights": lambda folder: change_config(folder, hidden_size=64),
    "config cut short": lambda folder: cut(folder / "config.json", 30),
    "unknown architecture": lambda folder: change_config(folder, model_type="nobody_knows"),
    "tokenizer cut short": lambda folder: cut(folder / "tokenizer.json", 1000),
    "no tokenizer": lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(tmp_path, checkpoint, fault):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    BROKEN[fault](folder)
    with pytest.raises(ValueError, match=r"^target\.path: .*model") as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_a_whole_checkpoint_is_loaded_with_its_weights(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    target = opened(checkpoint)
    assert torch.equal(target.head_weight, tensors["lm_head.weight"])
    assert torch.equal(target.embeddings.weight, tensors["model.embed_tokens.weight"])


def test_a_loaded_target_is_frozen(checkpoint):
    model = opened(checkpoint).model
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_dtype_auto_is_float32_on_a_cpu_and_a_named_one_is_kept(tmp_path, checkpoint):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    change_config(folder, dtype="bfloat16")
    assert opened(folder).info.dtype == "float32"
    assert opened(folder, dtype="bfloat16").head_weight.dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", ["qwen3", "nobody_knows"])
def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path, checkpoint, model_type):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    marker = tmp_path / "marker"
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    change_config(folder, model_type=model_type, auto_map=classes)
    tokenizer = folder / "tokenizer_config.json"
    auto_map = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | auto_map))
    if model_type == "qwen3":
        assert opened(folder).info.architecture == "Qwen3ForCausalLM"
    else:
        with pytest.raises(ValueError, match=r"target\.path: .*custom code"):
            opened(folder)
    assert not marker.exists()


def test_a_gguf_file_is_named_by_its_most_frequent_type(tmp_path, gguf_bytes):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes)
    assert check_gguf(path) == "gguf:F16"  # 64 numbers, and 32 of F32


def test_a_gguf_file_cut_anywhere_is_refused(tmp_path, gguf_bytes):
    path = tmp_path / "tiny.gguf"
    for num_bytes in range(len(gguf_bytes)):
        path.write_bytes(gguf_bytes[:num_bytes])
        with pytest.raises(ValueError, match=r"^target\.path: .*tiny\.gguf"):
            check_gguf(path)


def test_a_cut_gguf_file_is_refused_before_transformers_sees_it(tmp_path, gguf_bytes):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes[:-1])
    with pytest.raises(ValueError, match=r"target\.path: .*no whole GGUF file.*again") as caught:
        opened(path)
    assert "\n" not in str(caught.value)


NO_TENSORS = b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(64)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"<html>" * 50, bytes(4096), NO_TENSORS])
def test_what_is_only_called_gguf_is_refused(tmp_path, content):
    path = tmp_path / "garbage.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"target\.path: .*garbage\.gguf") as caught:
        opened(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_sizes_are_read_from_the_checkpoint(tmp_path, architecture):
    info = opened(write_target(tmp_path / "model", architecture)).info
    assert (info.hidden_size, info.num_layers, info.vocab_size) == (32, 6, 320)
    assert (info.num_heads, info.num_kv_heads, info.head_dim) == (4, 2, 16)
    assert (info.max_position_embeddings, info.hidden_act) == (256, "silu")
    assert info.tied_embeddings is (architecture == "llama")
    assert info.eos_ids == [1]
    assert info.quantization is None


def test_the_theta_and_the_scaling_of_rope_are_the_targets(tmp_path):
    info = opened(write_target(tmp_path / "model", "llama3_rope")).info
    assert info.rope_parameters == CONFIGS["llama3_rope"].rope_parameters
    assert info.rope_parameters["rope_theta"] == 500000.0


def test_every_token_that_ends_an_answer_is_read(tmp_path, checkpoint):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7, 3]}))
    assert opened(folder).info.eos_ids == [1, 3, 7]
