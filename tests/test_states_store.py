"""A store gives back what the target computes on the fly, or says which file is not whole."""

import json
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_architectures import random_tokens, tiny

from specfit.artifacts import Artifact, ArtifactStore, CorruptArtifact, Recipe
from specfit.config import ExtractConfig, StateDtype
from specfit.files import append_jsonl
from specfit.stages import extract
from specfit.states.codec import bytes_per_token
from specfit.states.compute import compute
from specfit.states.documents import Document, read_documents
from specfit.states.online import OnlineStates
from specfit.states.store import StateStore, plan_shards
from specfit.targets.target import HiddenStates

AUX = [1, 3, 5]
LENGTHS = [9, 4, 14, 4, 21, 12]
every_dtype = pytest.mark.parametrize("dtype", StateDtype)


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch):
    monkeypatch.setattr(extract, "speed", lambda **_: {})


def rows() -> list[dict[str, object]]:
    """What `generate` leaves: the second half of each conversation is the assistant's."""
    return [
        {
            "id": f"d{i}",
            "component": "coding",
            "source": "s",
            "split": "validation" if i == 3 else "train",
            "input_ids": random_tokens(length, seed=i).tolist(),
            "loss_spans": [[length // 2, length]],
        }
        for i, length in enumerate(LENGTHS)
    ]


def answers(root: Path) -> Artifact:
    recipe = Recipe("generate", 1, {}, {})
    return ArtifactStore(root).get_or_make(
        recipe, lambda folder: append_jsonl(folder / "answers.jsonl", rows())
    )


def stored(root: Path, dtype: StateDtype, architecture: str = "llama") -> Artifact:
    """An `extract` artifact of several shards."""
    config = ExtractConfig(dtype=dtype, shard_tokens=25)
    source = answers(root)
    return ArtifactStore(root).get_or_make(
        Recipe("extract", 1, {"dtype": dtype}, {}),
        lambda folder: extract.run(
            folder, config=config, aux_layers=AUX, answers=source, target=tiny(architecture)
        ),
    )


def documents(root: Path) -> dict[str, Document]:
    path = answers(root).file("answers.jsonl")
    found = read_documents(path, max_tokens=100, splits=("train", "validation"))
    return {document.id: document for document in found}


def assert_equal(found: HiddenStates, expected: HiddenStates) -> None:
    for field in fields(HiddenStates):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        assert a.dtype == b.dtype, field.name
        assert torch.equal(a, b), field.name


@every_dtype
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_store_and_states_on_the_fly_are_bit_equal(tmp_path, dtype, architecture):
    store = StateStore(stored(tmp_path, dtype, architecture))
    by_id = documents(tmp_path)
    assert {place.id for place in store.documents} == set(by_id)
    listed = [by_id[place.id] for place in store.documents]
    online = OnlineStates(tiny(architecture), listed, AUX, dtype)
    for index in range(len(listed)):
        assert_equal(store.read(index), online.read(index))


def test_float32_states_are_those_of_the_target(tmp_path):
    store = StateStore(stored(tmp_path, StateDtype.fp32))
    for index, place in enumerate(store.documents):
        found = store.read(index)
        ids = torch.tensor([documents(tmp_path)[place.id].input_ids])
        with torch.inference_mode():
            plain = tiny("llama").model(ids, output_hidden_states=True)
        for aux, layer in enumerate(AUX):
            torch.testing.assert_close(found.aux[:, aux], plain.hidden_states[layer][0])
        torch.testing.assert_close(
            tiny("llama").final_norm(found.last), plain.hidden_states[-1][0], rtol=1e-5, atol=1e-5
        )


def test_tokens_masks_components_and_splits_come_back(tmp_path):
    store = StateStore(stored(tmp_path, StateDtype.bf16))
    for index, place in enumerate(store.documents):
        document, found = documents(tmp_path)[place.id], store.read(index)
        assert (place.component, place.split) == (document.component, document.split)
        assert found.input_ids.tolist() == document.input_ids
        half = len(document.input_ids) // 2
        assert found.loss_mask.tolist() == [i >= half for i in range(len(document.input_ids))]


@every_dtype
def test_bytes_per_token_are_the_bytes_of_a_shard(tmp_path, dtype):
    for path in stored(tmp_path, dtype).path.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            tensors = [shard.get_tensor(name) for name in shard.keys()]  # noqa: SIM118
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        num_tokens = len(tensors[0])
        assert num_bytes == num_tokens * bytes_per_token(len(AUX) + 1, 32, dtype)


@pytest.mark.parametrize("dtype", [StateDtype.fp32, StateDtype.int8])
def test_the_targets_distribution_is_that_of_the_stored_last_state(tmp_path, dtype):
    store = StateStore(stored(tmp_path, dtype))
    model = deepcopy(tiny("llama").model).double()
    for index in range(len(store.documents)):
        found = store.read(index)
        learned = [i for i in range(len(found.last) - 1) if found.loss_mask[i + 1]]
        rest = [i for i in range(len(found.last)) if i not in learned]
        last = found.last[learned].double()
        norm = last * (last.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        logits = (norm * model.model.norm.weight) @ model.lm_head.weight.T
        expected = logits.exp().sum(-1).log()
        torch.testing.assert_close(
            found.log_normalizer[learned].double(), expected, rtol=0, atol=1e-5
        )
        assert torch.equal(found.top_token[learned], logits.argmax(-1))
        assert not found.log_normalizer[rest].any()
        assert not found.top_token[rest].any()


def test_a_batch_gives_each_document_what_it_gets_alone(tmp_path):
    listed = list(documents(tmp_path).values())
    together = compute(tiny("llama"), listed, AUX, StateDtype.fp32)
    for (found, _), document in zip(together, listed, strict=True):
        (expected, _), *_ = compute(tiny("llama"), [document], AUX, StateDtype.fp32)
        assert len(found.last) == len(document.input_ids)
        # Sums in another order: some float32 ulps of the largest value, through six layers.
        atol = 2e-5 * float(expected.last.abs().max())
        torch.testing.assert_close(found.aux, expected.aux, rtol=0, atol=atol)
        torch.testing.assert_close(found.last, expected.last, rtol=0, atol=atol)


@every_dtype
def test_states_on_the_fly_can_be_trained_on(tmp_path, dtype):
    states = OnlineStates(tiny("llama"), list(documents(tmp_path).values()), AUX, dtype).read(0)
    # autograd refuses to keep tensors of inference mode for its backward pass.
    assert not any(getattr(states, field.name).is_inference() for field in fields(HiddenStates))


def test_a_flipped_byte_in_a_shard_is_named(tmp_path):
    artifact = stored(tmp_path, StateDtype.bf16)
    path = artifact.path / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    store = StateStore(artifact)
    shards = [place.shard for place in store.documents]
    store.read(shards.index("shard-00000.safetensors"))
    with pytest.raises(CorruptArtifact, match=r"shard-00001\.safetensors"):
        store.read(shards.index("shard-00001.safetensors"))


def test_documents_fill_shards_in_order_and_none_is_split():
    listed = [
        Document(f"d{i}", "c", "s", "train", [0] * n, [(0, n)]) for i, n in enumerate(LENGTHS)
    ]
    shards = plan_shards(listed, 18)
    lengths = [[document.num_tokens for document in shard] for shard in shards]
    assert lengths == [[9, 4], [14, 4], [21], [12]]  # 21 is longer than a shard and has its own


def test_places_are_the_rows_of_each_document_in_its_shard(tmp_path):
    found = StateStore(stored(tmp_path, StateDtype.bf16)).documents
    assert [(p.shard[6:11], p.start, p.num_tokens) for p in found] == [
        ("00000", 0, 4),
        ("00000", 4, 4),
        ("00000", 8, 9),
        ("00001", 0, 12),
        ("00002", 0, 14),
        ("00003", 0, 21),
    ]


def test_a_document_is_cut_and_one_with_nothing_left_to_learn_goes(tmp_path):
    path = tmp_path / "answers.jsonl"
    row = {"component": "c", "source": "s", "split": "train", "input_ids": list(range(10))}
    spans = {"cut": [[2, 4], [6, 9]], "late": [[7, 9]], "none": [], "edge": [[3, 7]]}
    lines = [json.dumps(row | {"id": name, "loss_spans": s}) for name, s in spans.items()]
    path.write_text("\n".join(lines) + "\n")
    found = {d.id: d for d in read_documents(path, max_tokens=7, splits=("train",))}
    assert list(found) == ["cut", "edge"]
    assert found["cut"].input_ids == list(range(7))
    assert found["cut"].loss_mask.nonzero().flatten().tolist() == [2, 3, 6]
    assert found["edge"].loss_mask.nonzero().flatten().tolist() == [3, 4, 5, 6]


def test_only_the_splits_asked_for_are_read(tmp_path):
    path = answers(tmp_path).file("answers.jsonl")
    found = read_documents(path, max_tokens=100, splits=("validation",))
    assert [document.id for document in found] == ["d3"]


def test_a_conversation_beyond_the_context_is_refused():
    target = tiny("llama")
    context = target.info.max_position_embeddings
    long = Document("a", "code", "s", "train", [5] * (context + 1), [(context - 4, context + 1)])
    with pytest.raises(ValueError, match=rf"extract\.max_tokens must be .* context of {context}:"):
        compute(target, [long], [1], StateDtype.fp32)
