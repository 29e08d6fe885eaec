"""The script behind `make table`, on a report made of the test's records."""

import readme_table

ROW = {
    "component": "coding",
    "proposer": "eagle3",
    "num_draft_tokens": 4,
    "acceptance_length": 1.714,
    "acceptance_length_low": 1.6,
    "acceptance_length_high": 1.8,
    "tokens_per_second": 14.96,
    "tokens_per_second_low": 14.0,
    "tokens_per_second_high": 16.0,
    "outputs_equal_plain": True,
}


def _table(*rows):
    return readme_table.table({"acceptance": {"rows": list(rows)}}).splitlines()


def test_a_row_shows_figures_with_their_intervals():
    header, _, line = _table(ROW)
    assert "k = 4" in header
    assert line == "| coding | eagle3 | 1.71 (1.60 to 1.80) | 15.0 (14.0 to 16.0) | yes |"


def test_plain_decoding_emits_one_token_a_round_and_the_mix_is_left_out():
    plain = ROW | {"proposer": "none", "num_draft_tokens": 0, "outputs_equal_plain": None}
    lines = _table(plain, ROW | {"component": "all"})
    assert len(lines) == 3
    assert "| coding | none | 1 |" in lines[2]


def test_what_was_not_timed_is_said_so():
    row = {key: value for key, value in ROW.items() if not key.startswith("tokens_per")}
    assert "not measured" in _table(row)[2]
