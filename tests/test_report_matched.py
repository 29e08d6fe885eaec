"""What the report says of how well a head matches its traffic."""

from specfit.report.acceptance import Acceptance
from specfit.report.document import Table, Text
from specfit.report.matched import matched, section


def row(component, length, *, proposer="eagle3", low=None, high=None, temperature=0.0, **more):
    found = {
        "component": component,
        "proposer": proposer,
        "temperature": temperature,
        "num_draft_tokens": 0 if proposer == "none" else 4,
        "num_rounds": 500,
        "acceptance_length": length,
        "acceptance_length_low": length - 0.05 if low is None else low,
        "acceptance_length_high": length + 0.05 if high is None else high,
        "tokens_per_second": 10.0,
    }
    return found | more


def record(**fitted):
    mixture = [
        {"component": "code", "requests": 0.5, "tokens": 0.25, "taken": 0.3, "capped": ""},
        {"component": "chat", "requests": 0.5, "tokens": 0.75, "taken": 0.7, "capped": ""},
    ]
    mixture[1] |= fitted
    return {
        "fit": {"mixture": mixture},
        "prompts": {"lengths": []},
        "latency": {"rows": []},
        "provenance": {"keys": {"measure": "k123"}},
    }


def measured(*rows):
    ngram = [row(c, 1.1, proposer="ngram") for c in ("code", "chat")]
    plain = [row(c, 1.0, proposer="none") for c in ("code", "chat")]
    return Acceptance.of({"rows": [*rows, *ngram, *plain]})


def test_rounds_are_tokens_over_acceptance_length():
    found = matched(record(), measured(row("code", 2.5), row("chat", 1.5)))
    # 0.25 / 2.5 and 0.75 / 1.5 rounds a token.
    assert [(m.component, round(m.rounds, 4)) for m in found] == [
        ("chat", round(0.5 / 0.6, 4)),
        ("code", round(0.1 / 0.6, 4)),
    ]
    assert all(m.reasons == [] for m in found)


def test_the_slowest_component_is_named_with_its_interval():
    [text, *_] = section(record(), measured(row("code", 2.5), row("chat", 1.5))).blocks
    assert isinstance(text, Text)
    assert text.text.startswith("chat is slowest with an acceptance length of 1.50")
    assert "83.3 % of the rounds, goes to chat" in text.text


def test_what_lies_within_the_intervals_only_seems_so():
    wide = {"low": 1.2, "high": 2.8}
    [text, *_] = section(
        record(), measured(row("code", 2.0, **wide), row("chat", 1.9, **wide))
    ).blocks
    assert "chat seems slowest, within the intervals," in text.text


def test_every_reason_is_said_where_it_holds():
    rows = [
        row("code", 2.5),
        row("chat", 1.05, coverage=0.9, temperature=0.7, num_rounds=20),
        row("chat", 1.0, proposer="none", temperature=0.7),
        row("chat", 1.2, proposer="ngram", temperature=0.7),
    ]
    contents = record(capped="capped at 10 of 20 tokens", taken=0.1)
    far = {"component": "chat", "split": "test", "quantity": "prompt_tokens", "distance": 0.4}
    contents["prompts"]["lengths"] = [far]
    ngram, plain = row("code", 1.1, proposer="ngram"), row("code", 1.0, proposer="none")
    found = matched(contents, Acceptance.of({"rows": [*rows, ngram, plain]}))
    reasons = {m.component: "; ".join(m.reasons) for m in found}
    assert reasons["code"] == ""
    for part in (
        "10.0 % of its tokens cannot be drafted",
        "capped at 10 of 20 tokens",
        "n-grams draft as well",
        "sampled at 0.7",
        "other lengths than wanted (prompt tokens)",
        "few rounds measured (20)",
    ):
        assert part in reasons["chat"]


def test_what_to_do_next_are_commands_with_the_run_s_own_keys():
    contents = record()
    best = {"kind": "best", "component": "all", "concurrency": 1, "best_k": 3}
    contents["latency"]["rows"] = [best | {"concurrency": 8, "best_k": 1}, best]
    [text] = [
        b
        for b in section(contents, measured(row("code", 2.5), row("chat", 1.5))).blocks
        if isinstance(b, Text) and b.text.startswith("What to do next")
    ]
    assert "fit.measured=artifacts/measure/k123" in text.text
    assert "Serve with k = 3 at a concurrency of 1" in text.text
    assert "stage=drift" in text.text


def test_turns_are_shown_where_sessions_have_several():
    turns = [
        {"turn": t, "acceptance_length": 2.0 / t, "num_prompts": 5, "num_rounds": 50}
        for t in (1, 2)
    ]
    blocks = section(
        record(), measured(row("code", 2.5, by_turn=turns), row("chat", 1.5, by_turn=turns[:1]))
    ).blocks
    [table] = [b for b in blocks if isinstance(b, Table) and b.caption.startswith("By the turn")]
    assert [r[:3] for r in table.rows] == [["code", "1", "2.00"], ["code", "2", "1.00"]]
