import pytest
import torch

from specfit_serve.ngram import NgramProposer, NoProposer


def rescan(tokens, num_tokens, min_length, max_length):
    """Prompt lookup by looking everywhere."""
    for length in range(max_length, min_length - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(suffix) == length and tokens[end - length : end] == suffix:
                return tokens[end : end + num_tokens]
    return []


def propose(proposer, sequences, num_draft_tokens):
    rows = len(sequences)
    draft = proposer.propose(
        sequences, num_draft_tokens, torch.zeros(rows), torch.zeros(rows, num_draft_tokens)
    )
    return [row[:n] for row, n in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_what_a_rescan_finds(seed):
    rng = torch.Generator().manual_seed(seed)
    proposer = NgramProposer(1 + seed % 3, 4)
    tokens = torch.randint(3, (1 + seed % 4,), generator=rng).tolist()
    proposer.start(0, tokens, None)
    for _ in range(40):
        assert propose(proposer, [tokens], 5) == [rescan(tokens, 5, 1 + seed % 3, 4)]
        num_new = int(torch.randint(1, 6, (), generator=rng))
        tokens += torch.randint(3, (num_new,), generator=rng).tolist()


def test_the_longest_suffix_wins_over_a_later_shorter_one():
    proposer = NgramProposer(1, 2)
    tokens = [1, 2, 7, 5, 2, 8, 1, 2]
    proposer.start(0, tokens, None)
    assert propose(proposer, [tokens], 1) == [[7]]


def test_the_most_recent_occurrence_wins():
    proposer = NgramProposer(1, 2)
    tokens = [1, 2, 7, 1, 2, 8, 1, 2]
    proposer.start(0, tokens, None)
    assert propose(proposer, [tokens], 1) == [[8]]


def test_a_started_slot_forgets_the_sequence_before():
    proposer = NgramProposer(1, 2)
    proposer.start(0, [1, 2, 1], None)
    proposer.start(0, [3, 1], None)
    assert propose(proposer, [[3, 1]], 2) == [[]]


def test_a_moved_sequence_keeps_its_index():
    proposer = NgramProposer(1, 2)
    proposer.start(0, [5, 6], None)
    proposer.start(1, [1, 2, 1], None)
    proposer.move(1, 0)
    assert propose(proposer, [[1, 2, 1]], 2) == [[2, 1]]


@pytest.mark.parametrize(("min_length", "max_length"), [(0, 2), (3, 2)])
def test_lengths_out_of_order_are_refused(min_length, max_length):
    with pytest.raises(ValueError, match=f"got min {min_length}, max {max_length}"):
        NgramProposer(min_length, max_length)


def test_no_proposer_drafts_nothing():
    assert propose(NoProposer(), [[1, 2, 1, 2], [3]], 4) == [[], []]
