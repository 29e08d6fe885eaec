"""The profile's own arrivals, simulated: which rows there are, and whose acceptance they have."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from simulated_traffic import Linear, profile

from specfit.prediction.config import PredictConfig
from specfit.prediction.goodput import RATES, can_be_drawn, simulated_rows, survival
from specfit.prediction.server import Acceptance, ServerConfig
from specfit.prediction.simulate import sweep
from specfit.traffic.config import ArrivalConfig, ArrivalKind

LENGTHS = {"chat": [1.0, 1.7, 2.15], "edit": [1.0, 1.8, 2.4, 2.9]}


def rows(lengths=LENGTHS, **settings):
    config = PredictConfig(num_sessions=40, **settings)
    return simulated_rows(config, profile(), Linear(), lengths, seed=0)


@pytest.fixture(scope="module")
def found():
    return rows()


def test_rates_are_multiples_of_the_profile_s_own(found):
    assert {row["sessions_per_second"] for row in found} == {4.0 * times for times in RATES}


def test_rates_that_are_given_count_instead():
    found = rows(rates=[0.5, 3.0])
    assert {row["sessions_per_second"] for row in found} == {0.5, 3.0}


def test_every_k_that_all_components_have_lengths_of_is_tried(found):
    places = [
        (row["sessions_per_second"], row["num_draft_tokens"], row["component"]) for row in found
    ]
    assert {k for _, k, _ in places} == {0, 1, 2}
    assert len(places) == len(set(places)) == len(RATES) * 3 * len(["all", "chat", "edit"])


def test_rows_are_those_of_a_sweep_with_the_same_acceptance(found):
    acceptance = {
        "chat": Acceptance.from_positions([0.7, 0.45]),
        "edit": Acceptance.from_positions([0.8, 0.6]),
    }
    expected = sweep(
        profile(),
        Linear(),
        acceptance,
        ServerConfig(),
        rates=[4.0],
        num_draft_tokens=[0, 1, 2],
        num_sessions=40,
        seed=0,
    )
    own = [row for row in found if row["sessions_per_second"] == 4.0]
    assert [row["ttft_ms_mean"] for row in own] == pytest.approx(
        [row["ttft_ms_mean"] for row in expected], rel=0.02
    )


def test_the_server_is_the_one_configured(found):
    one = rows(rates=[4.0], server=ServerConfig(max_batch=1))
    own = [row for row in found if row["sessions_per_second"] == 4.0]
    assert one[0]["mean_batch"] == 1.0 < own[0]["mean_batch"]


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ([1.0], []),
        ([1.0, 1.8, 2.4, 2.9], [0.8, 0.6, 0.5]),
        # Measured apart, the second token seems to add more than the first: they share it.
        ([1.0, 1.3, 2.0], [0.5, 0.5]),
        # A third that seems to take away is not kept.
        ([1.0, 1.5, 1.7, 1.6], [0.5, 0.2, 0.0]),
        # 0.2 and 0.5 share 0.35, which is above the 0.3 before: all three share.
        ([1.0, 1.3, 1.5, 2.0], [1 / 3] * 3),
    ],
)
def test_what_is_kept_follows_from_lengths(lengths, kept):
    assert survival(lengths) == pytest.approx(kept)


@pytest.mark.parametrize("lengths", [[1.0, 1.3, 2.0, 2.1], [1.0, 1.9, 1.8, 2.5], [1.0, 1.0, 1.4]])
def test_acceptance_made_of_any_lengths_is_possible_and_the_longest_stays(lengths):
    kept = survival(lengths)
    assert all(1 >= before >= after >= 0 for before, after in pairwise([1.0, *kept]))
    assert 1 + sum(kept) == pytest.approx(lengths[-1])
    lengths_again = list(accumulate([1.0, *kept]))
    found = Acceptance.from_positions(kept)
    assert [found.cut(k).acceptance_length for k in range(len(lengths))] == pytest.approx(
        lengths_again
    )


@pytest.mark.parametrize(
    ("kind", "drawn"),
    [
        (ArrivalConfig(rate=1.0), True),
        (ArrivalConfig(kind=ArrivalKind.closed), False),
        (ArrivalConfig(kind=ArrivalKind.replay, file="x"), False),
    ],
)
def test_only_arrivals_with_a_rate_are_simulated_at_several(kind, drawn):
    assert can_be_drawn(replace(profile(), arrival=kind)) is drawn


@pytest.mark.parametrize("length", ["prompt_tokens", "output_tokens"])
def test_a_profile_without_lengths_is_not_simulated(length):
    made = profile()
    setattr(made.components[1], length, None)
    assert not can_be_drawn(made)
