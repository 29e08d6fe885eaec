"""The page of a profile says how it was fitted to a log."""

from specfit.report.document import Table, Text
from specfit.report.traffic import logs

RECORD = {
    "log": "today.jsonl",
    "num_requests": 1200,
    "num_sessions": 400,
    "dropped": ["chat"],
    "notes": ["Answers have no length."],
    "components": [
        {
            "name": "code",
            "weight": 0.8,
            "weight_low": 0.75,
            "weight_high": 0.85,
            "num_sessions": 330,
            "from_base": ["output_tokens"],
            "few_sessions": False,
        }
    ],
    "confusion": {"components": ["code", "chat"], "rows": [[0.9, 0.1], [0.25, 0.75]]},
}


def test_a_profile_that_was_not_fitted_to_a_log_has_no_such_section():
    assert logs(None) == []


def test_shares_stand_with_their_intervals_and_what_the_log_does_not_say():
    [section] = logs(RECORD)
    text, shares, _ = section.blocks
    assert isinstance(text, Text)
    for part in ("1,200 requests of 400 sessions in today.jsonl", "dropped: chat", "no length"):
        assert part in text.text
    assert isinstance(shares, Table)
    assert [str(cell) for cell in shares.rows[0]] == [
        "code",
        "80.0 (75.0\N{EN DASH}85.0)",
        "330",
        "output_tokens",
        "no",
    ]


def test_the_classifier_s_confusion_is_published():
    [section] = logs(RECORD)
    confusion = section.blocks[-1]
    assert isinstance(confusion, Table)
    assert confusion.rows == [["code", "90.0", "10.0"], ["chat", "25.0", "75.0"]]


def test_one_component_has_nothing_to_be_mistaken_for():
    [section] = logs(RECORD | {"confusion": None})
    assert len(section.blocks) == 2
