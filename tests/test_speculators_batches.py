"""Packs of documents, and where chains start and end in them."""

import pytest
import tiny_heads
import torch

from specfit.speculators.batches import chain_counts, chain_starts, epoch_packs, pack
from specfit.speculators.unroll import unroll
from specfit.targets.target import HiddenStates


def blank(mask: list[int]) -> HiddenStates:
    n = len(mask)
    zeros = torch.zeros(n)
    return HiddenStates(
        torch.arange(n),
        torch.tensor(mask, dtype=torch.bool),
        torch.zeros(n, 1, 2),
        torch.zeros(n, 2),
        zeros,
        zeros.long(),
    )


def random_masks(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (4,), generator=generator).tolist()
    return [torch.randint(2, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("seed", range(20))
def test_chains_start_and_end_where_brute_force_says(seed):
    masks = random_masks(seed)
    expected = {}
    first = 0
    for mask in masks:
        for t in range(len(mask)):
            learned = [t + 2 + s < len(mask) and mask[t + 2 + s] == 1 for s in range(3)]
            if learned[0]:
                expected[first + t] = [all(learned[: s + 1]) for s in range(3)]
        first += len(mask)
    batch = pack([blank(mask) for mask in masks])
    starts = chain_starts(batch)
    assert starts.tolist() == list(expected)
    assert chain_counts(batch, starts, 3).T.tolist() == list(expected.values())


def test_positions_begin_anew_in_each_document():
    batch = pack([blank([0, 1]), blank([1]), blank([0, 0, 1])])
    assert batch.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.document_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.lengths == (2, 1, 3)


def test_an_epoch_has_every_document_once_in_packs_of_the_size_asked_for():
    lengths = [3, 9, 4, 4, 2, 30, 1, 8]
    packs = epoch_packs(lengths, 10, seed=0, epoch=0)
    assert sorted(i for p in packs for i in p) == list(range(8))
    assert all(sum(lengths[i] for i in p) <= 10 or p == [5] for p in packs)


def test_the_order_of_documents_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        packs = epoch_packs([1] * 12, 4, seed=seed, epoch=epoch)
        return [i for p in packs for i in p]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def logits(speculator, documents, *, teacher_forced=True):
    """By document: the logits of each step of its chains."""
    batch = pack(documents)
    starts = chain_starts(batch)
    with torch.no_grad():
        steps = unroll(
            speculator.head,
            batch,
            starts,
            num_steps=3,
            teacher_forced=teacher_forced,
            **speculator.drafting,
        )
        stacked = torch.stack([step.logits for step in steps], dim=1)
    # Steps that run on into the next document are in no loss.
    counted = chain_counts(batch, starts, 3).T
    owners = batch.document_ids[starts]
    masked = stacked.masked_fill(~counted[..., None], 0)
    return [masked[owners == i] for i in range(len(documents))]


@pytest.mark.parametrize("place", [0, 2])
def test_a_documents_neighbours_change_no_bit_of_its_logits_and_loss(place):
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    random = tiny_heads.random_tokens
    own = speculator.document(random(12, seed=1), [(4, 12)])
    found, losses = [], []
    for seed in (10, 20):
        others = [speculator.document(random(n, seed + n), [(2, n - 1)]) for n in (9, 13)]
        # Nothing of the neighbours is in the loss, so that all of it is the document's.
        quiet = [HiddenStates(**(vars(o) | {"loss_mask": o.loss_mask & False})) for o in others]
        found.append(logits(speculator, [*others[:place], own, *others[place:]])[place])
        losses.append(speculator.objective()(pack([*quiet[:place], own, *quiet[place:]])).loss)
    assert len(found[0]) == 8
    assert torch.equal(found[0], found[1])
    assert torch.equal(losses[0], losses[1])


def test_the_order_of_documents_is_irrelevant_but_for_rounding():
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    random = tiny_heads.random_tokens
    documents = [speculator.document(random(n, n), [(3, n)]) for n in (7, 11, 16)]
    forward = logits(speculator, documents)
    backward = logits(speculator, documents[::-1])
    for one, other in zip(forward, backward[::-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    losses = [speculator.objective()(pack(d)).loss for d in (documents, documents[::-1])]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


def test_chains_of_one_document_in_a_pack_are_those_of_the_document_alone():
    speculator = tiny_heads.make_speculator(tiny_heads.make_target())
    random = tiny_heads.random_tokens
    documents = [speculator.document(random(n, n), [(3, n)]) for n in (7, 11)]
    together = logits(speculator, documents, teacher_forced=False)
    for document, packed in zip(documents, together, strict=True):
        (alone,) = logits(speculator, [document], teacher_forced=False)
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
