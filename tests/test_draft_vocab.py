"""Which tokens can be drafted, and how draft ids become target ids."""

import pytest
import torch

from specfit.draft_vocab import DraftVocab

COUNTS = torch.tensor([5.0, 0.0, 9.0, 1.0, 9.0, 0.0, 2.0, 0.5])


def test_the_most_frequent_tokens_are_chosen_in_the_order_of_their_ids():
    vocab = DraftVocab.from_counts(COUNTS, 4, always=[])
    assert vocab.target_ids.tolist() == [0, 2, 4, 6]


def test_d2t_holds_offsets_from_draft_id_to_target_id():
    vocab = DraftVocab.from_counts(COUNTS, 4, always=[])
    assert vocab.d2t.tolist() == [0 - 0, 2 - 1, 4 - 2, 6 - 3]


def test_t2d_marks_the_tokens_that_can_be_drafted():
    vocab = DraftVocab.from_counts(COUNTS, 4, always=[])
    assert vocab.t2d.tolist() == [True, False, True, False, True, False, True, False]


def test_ties_go_to_the_lower_id():
    assert DraftVocab.from_counts(COUNTS, 1, always=[]).target_ids.tolist() == [2]
    assert DraftVocab.from_counts(torch.zeros(1000), 3, always=[]).target_ids.tolist() == [0, 1, 2]


def test_tokens_that_always_belong_are_in_whatever_their_count():
    assert DraftVocab.from_counts(COUNTS, 2, always=[5]).target_ids.tolist() == [2, 5]
    assert DraftVocab.from_counts(COUNTS, 2, always=[5, 1]).target_ids.tolist() == [1, 5]


def test_counts_beyond_float32_are_told_apart():
    counts = torch.tensor([2.0**30, 2.0**30 + 1], dtype=torch.float64)
    assert DraftVocab.from_counts(counts, 1, always=[]).target_ids.tolist() == [1]


def test_the_counts_given_stay_as_they_are():
    counts = COUNTS.clone()
    DraftVocab.from_counts(counts, 3, always=[1])
    assert torch.equal(counts, COUNTS)


def test_the_whole_vocabulary_is_the_identity():
    vocab = DraftVocab.from_counts(COUNTS, len(COUNTS), always=[])
    assert vocab.d2t.tolist() == [0] * len(COUNTS)
    assert bool(vocab.t2d.all())


def test_draft_ids_invert_target_ids_and_are_minus_one_elsewhere():
    vocab = DraftVocab.from_counts(COUNTS, 4, always=[])
    assert vocab.draft_ids.tolist() == [0, -1, 1, -1, 2, -1, 3, -1]


@pytest.mark.parametrize("size", [0, -1, len(COUNTS) + 1])
def test_a_size_outside_the_targets_vocabulary_is_refused(size):
    with pytest.raises(ValueError, match=rf"speculator\.draft_vocab_size.* of 8, got {size}$"):
        DraftVocab.from_counts(COUNTS, size, always=[])


def test_a_size_that_drops_a_token_that_always_belongs_is_refused():
    with pytest.raises(ValueError, match=r"speculator\.draft_vocab_size.*\[1, 5, 7\], got 2$"):
        DraftVocab.from_counts(COUNTS, 2, always=[7, 1, 5])


def test_what_is_saved_is_loaded(tmp_path):
    vocab = DraftVocab.from_counts(COUNTS, 3, always=[7])
    vocab.save(tmp_path / "draft_vocab.safetensors")
    loaded = DraftVocab.load(tmp_path / "draft_vocab.safetensors")
    assert torch.equal(loaded.d2t, vocab.d2t)
    assert torch.equal(loaded.t2d, vocab.t2d)
    assert (loaded.d2t.dtype, loaded.t2d.dtype) == (torch.int64, torch.bool)
