"""Our safetensors files against the library's."""

import json
import os
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sharded_targets import same

from specfit.quantization.safetensors_stream import (
    INDEX,
    SINGLE,
    TensorSpec,
    arrange,
    is_written,
    read_shard,
    read_shards,
    write_shard,
)

METADATA = {"format": "pt", "ünï": 'a "quoted" word'}


def example() -> dict[str, torch.Tensor]:
    """Tensors of all kinds: each type, odd sizes, a scalar, nothing, a name in JSON's way."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5, 7, generator=generator)
    types = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
    types += [torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    found = {f"of.{dtype}".replace("torch.", ""): values.to(dtype) for dtype in types}
    return found | {
        "bool": values > 0,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        'a"b\\c': torch.arange(3),
        "transposed": values[0].T,
        "large": torch.randn(1100, 1000, generator=generator),  # more than one chunk of a copy
    }


def write(path, tensors):
    arrangement = arrange({n: TensorSpec(t.dtype, tuple(t.shape)) for n, t in tensors.items()}, {})
    write_shard(path, arrangement, tensors.items())
    return arrangement


def test_the_library_reads_what_is_written(tmp_path):
    tensors = example()
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    path = tmp_path / "a.safetensors"
    write_shard(path, arrange(specs, METADATA), reversed(tensors.items()))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert [name for name in tensors if not same(found[name], tensors[name].contiguous())] == []
    with safe_open(path, "pt") as file:
        assert file.metadata() == METADATA


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in example().items()}
    save_file(tensors, tmp_path / "a.safetensors", metadata=METADATA)
    shard = read_shard(tmp_path / "a.safetensors")
    assert shard.metadata == METADATA
    assert shard.tensors.keys() == tensors.keys()
    assert [n for n, stored in shard.tensors.items() if not same(stored.read(), tensors[n])] == []


def test_a_tensor_is_copied_byte_for_byte(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in example().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    stored = read_shard(tmp_path / "a.safetensors").tensors
    write_shard(tmp_path / "b.safetensors", arrange(stored, {}), stored.items())
    found = load_file(tmp_path / "b.safetensors")
    assert [name for name in tensors if not same(found[name], tensors[name])] == []


def test_every_tensor_lies_at_a_multiple_of_its_types_size(tmp_path):
    write(tmp_path / "a.safetensors", example())
    stored = read_shard(tmp_path / "a.safetensors").tensors.values()
    assert [s for s in stored if s.start % s.dtype.itemsize] == []


def test_the_size_is_known_before_the_file_is_there(tmp_path):
    arrangement = write(tmp_path / "a.safetensors", example())
    assert (tmp_path / "a.safetensors").stat().st_size == arrangement.num_bytes


def test_parts_are_slices(tmp_path):
    experts = torch.randn(4, 6, 8)
    save_file({"x": experts, "y": torch.randn(3)}, tmp_path / "a.safetensors")
    stored = read_shard(tmp_path / "a.safetensors").tensors["x"]
    assert torch.equal(stored.part(1, 3).read(), experts[1:3])
    assert torch.equal(stored[3].read(), experts[3])
    assert torch.equal(stored[2].part(3, 6).read(), experts[2, 3:6])


def test_what_is_read_is_ones_own(tmp_path):
    save_file({"x": torch.zeros(4)}, tmp_path / "a.safetensors")
    stored = read_shard(tmp_path / "a.safetensors").tensors["x"]
    stored.read().add_(1)
    assert stored.read().tolist() == [0, 0, 0, 0]


def test_a_file_that_is_not_finished_is_not_there(tmp_path):
    path = tmp_path / "a.safetensors"

    def tensors():
        yield "x", torch.zeros(4)
        raise KeyboardInterrupt

    spec = TensorSpec(torch.float32, (4,))
    arrangement = arrange({"x": spec, "y": spec}, {})
    with pytest.raises(KeyboardInterrupt):
        write_shard(path, arrangement, tensors())
    assert not path.exists()
    assert not is_written(path, arrangement)
    write_shard(path, arrangement, {"x": torch.zeros(4), "y": torch.ones(4)}.items())
    assert is_written(path, arrangement)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_file_of_other_tensors_is_not_taken_for_the_one_that_is_wanted(tmp_path):
    write(tmp_path / "a.safetensors", {"x": torch.zeros(4)})
    same_size = arrange({"y": TensorSpec(torch.float32, (4,))}, {})
    assert (tmp_path / "a.safetensors").stat().st_size == same_size.num_bytes
    assert not is_written(tmp_path / "a.safetensors", same_size)


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -500, -1], ids=lambda n: f"{n}_bytes")
def test_a_truncated_file_is_named(tmp_path, kept):
    path = tmp_path / SINGLE
    save_file({"x": torch.zeros(1000)}, path)
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} must be a whole safetensors"):
        read_shards(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"not JSON",
        b'{"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}',
        b'{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2]}}',
        b'{"x": {"dtype": "U8", "shape": [2]}}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, header):
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(ValueError, match=rf"{SINGLE} must be a whole safetensors file"):
        read_shards(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "1.safetensors")
    index = {"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"2\.safetensors must be there"):
        read_shards(tmp_path)


def test_a_shard_without_what_the_index_says_is_named(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "1.safetensors")
    index = {"weight_map": {"x": "1.safetensors", "y": "1.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"1\.safetensors must hold y"):
        read_shards(tmp_path)


def test_a_folder_without_an_index_has_one_shard(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / SINGLE)
    save_file({"y": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert [shard.path.name for shard in read_shards(tmp_path)] == [SINGLE]
