import pytest

from specfit_data.example_page import example_html


def test_the_text_of_tokens_is_escaped_and_its_whitespace_is_shown():
    page = example_html(["<b>", " a\n", "\t&"], [False, True, False], "x & y")
    assert "&lt;b&gt;" in page
    assert "·a⏎<br>" in page
    assert "→&amp;" in page
    assert "<b>" not in page


def test_learned_and_given_tokens_look_different():
    page = example_html(["asked", "told"], [False, True], "title")
    assert '<span class="given">asked</span>' in page
    assert '<span class="learned">told</span>' in page
    assert "1 of 2 tokens are learned" in page


def test_a_page_needs_nothing_from_elsewhere():
    page = example_html(["a"], [True], "title")
    assert "http" not in page
    assert "src=" not in page


def test_a_flag_is_needed_for_every_token():
    with pytest.raises(ValueError, match="got 1 for 2"):
        example_html(["a", "b"], [True], "title")
