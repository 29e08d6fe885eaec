"""Pages go to slots as sequences grow, and come back."""

import pytest

from specfit_serve.pages import PageTable


@pytest.fixture
def pages():
    """Five pages of four columns for three slots; page 0 is nobody's."""
    return PageTable(num_slots=3, max_length=14, page=4, num_pages=6)


def test_a_slot_has_as_many_pages_as_its_columns_take(pages):
    for length, held in ((0, 0), (1, 1), (4, 1), (5, 2), (3, 2)):
        assert pages.reserve(0, length)
        assert pages.num_free == 5 - held
    assert pages.table[0].tolist() == [1, 2, 0, 0]


def test_no_page_has_two_slots(pages):
    assert pages.reserve(0, 8)
    assert pages.reserve(1, 4)
    assert pages.reserve(0, 9)
    held = [*pages.table[0, :3].tolist(), *pages.table[1, :1].tolist()]
    assert sorted(held) == [1, 2, 3, 4]


def test_what_does_not_fit_is_refused_and_takes_nothing(pages):
    assert pages.reserve(0, 14)
    assert not pages.reserve(1, 5)
    assert pages.num_free == 1
    assert pages.table[1].tolist() == [0, 0, 0, 0]
    assert not pages.reserve(0, 15)


def test_released_pages_are_given_again(pages):
    assert pages.reserve(0, 14)
    pages.release(0)
    assert pages.num_free == 5
    assert pages.table.eq(0).all()
    assert pages.reserve(1, 14)
    pages.release(1)
    pages.release(1)
    assert pages.num_free == 5


def test_nothing_is_moved_onto_itself(pages):
    assert pages.reserve(1, 8)
    with pytest.raises(AssertionError):
        pages.move(1, 1)
    assert pages.table[1].tolist() == [1, 2, 0, 0]


def test_a_moved_sequence_keeps_its_pages_and_frees_those_it_replaces(pages):
    assert pages.reserve(0, 8)
    assert pages.reserve(2, 6)
    moved = pages.table[2].tolist()
    pages.move(2, 0)
    assert pages.table[0].tolist() == moved
    assert pages.table[2].tolist() == [0, 0, 0, 0]
    assert pages.num_free == 3
    assert pages.reserve(0, 9)
    assert pages.reserve(2, 8)
    assert pages.num_free == 0
