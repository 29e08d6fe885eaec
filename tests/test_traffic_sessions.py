"""Sessions have the turns and lengths that are wanted, and no conversation twice."""

import pytest

from specfit.traffic.config import ComponentConfig, ProfileConfig, Quantiles
from specfit.traffic.sessions import Candidate, Lengths, Wanted, output_limits, put_together
from specfit_data.conversations import Conversation, Message


def candidate(i, num_tokens=100, follow_ups=0):
    later = tuple((Message("user", f"later {i}.{n}"),) for n in range(follow_ups))
    messages = (Message("user", f"question {i}"), Message("assistant", "answer"))
    return Candidate(Conversation(messages, (), f"id{i}", "s", "own", later), num_tokens)


def wanted(num, *, max_turns=None, scale=1.0, **lengths):
    component = ComponentConfig("c", 1.0, ["s"], **lengths)
    profile = ProfileConfig("p", [component], scale=scale, max_turns=max_turns)
    return Wanted.of(component, profile, num, 0)


def questions(sessions):
    first = [s.first.messages[0].content for s in sessions]
    later = [m.content for s in sessions for turn in s.follow_ups for m in turn]
    return [*first, *later]


def test_without_turns_conversations_are_taken_as_they_are_in_the_order_drawn():
    candidates = [candidate(i, follow_ups=2) for i in range(5)]
    sessions = put_together(wanted(3), candidates)
    assert [s.first for s in sessions] == [c.conversation for c in candidates[:3]]
    assert all(s.follow_ups == () for s in sessions)


def test_turns_are_those_of_the_profile_and_no_question_is_asked_twice():
    plan = wanted(20, turns=Quantiles(2.0, 4.0))
    sessions = put_together(plan, [candidate(i) for i in range(200)])
    assert [1 + len(s.follow_ups) for s in sessions] == plan.turns
    assert sorted(plan.turns)[10] == 2
    assert len(set(questions(sessions))) == len(questions(sessions)) == sum(plan.turns)


def test_turns_of_a_conversation_s_own_come_first():
    plan = wanted(1, turns=Quantiles(3.0, 3.0))
    [session] = put_together(plan, [candidate(i, follow_ups=1) for i in range(9)])
    assert questions([session]) == ["question 0", "later 0.0", "question 1"]
    assert session.num_composed == 1


def test_turns_beyond_the_most_are_cut():
    plan = wanted(10, turns=Quantiles(45.0, 156.0), max_turns=3)
    assert max(plan.turns) == 3
    sessions = put_together(plan, [candidate(i, follow_ups=9) for i in range(40)])
    assert [len(s.follow_ups) for s in sessions] == [t - 1 for t in plan.turns]


def test_where_conversations_run_out_later_sessions_are_shorter():
    plan = wanted(4, turns=Quantiles(3.0, 3.0))
    sessions = put_together(plan, [candidate(i) for i in range(6)])
    assert [1 + len(s.follow_ups) for s in sessions] == [3, 1, 1, 1]


def test_prompts_are_taken_by_their_length_on_the_profile_s_scale():
    plan = wanted(8, prompt_tokens=Quantiles(800.0, 1600.0), scale=8.0)
    candidates = [candidate(i, num_tokens=10 * (1 + i % 30)) for i in range(plan.num_candidates)]
    taken = {s.first.id for s in put_together(plan, candidates)}
    lengths = sorted(c.num_tokens for c in candidates if c.conversation.id in taken)
    assert 90 <= lengths[4] <= 120
    assert lengths[-1] >= 180


def test_answers_are_limited_as_the_profile_says_whatever_the_scale():
    plan = wanted(50, output_tokens=Quantiles(20.0, 80.0), scale=64.0)
    limits = [limit for session in output_limits(plan, [1] * 50, 0) for limit in session]
    assert sorted(limits)[25] == pytest.approx(20, abs=1)
    assert sorted(limits)[45] == pytest.approx(80, rel=0.1)
    assert output_limits(wanted(2), [1, 1], 0) == [None, None]


def test_what_was_taken_stands_beside_what_is_wanted():
    component = ComponentConfig(
        "c", 1.0, ["s"], prompt_tokens=Quantiles(100.0, 200.0), turns=Quantiles(1.0, 2.0)
    )
    plan = Wanted.of(component, ProfileConfig("p", [component]), 3, 0)
    found = Lengths([90, 100, 110], [50], [1, 1, 2])
    rows = {row["quantity"]: row for row in found.rows(plan, component)}
    assert rows["prompt_tokens"]["got"][1] == 100
    assert rows["prompt_tokens"]["wanted"][1:] == pytest.approx([100, 200])
    assert rows["turns"]["distance"] is None
    assert set(rows) == {"prompt_tokens", "new_tokens_per_turn", "turns"}


def test_turns_that_the_profile_cuts_are_not_wanted_and_a_prefix_is():
    component = ComponentConfig(
        "c", 1.0, ["s"], turns=Quantiles(45.0, 156.0), shared_prefix_tokens=400
    )
    profile = ProfileConfig("p", [component], scale=4.0, max_turns=2)
    found = Lengths([90, 100], [50, 60], [2, 2], prefixes=[30, 30])
    plan = Wanted.of(component, profile, 2, 0)
    rows = {row["quantity"]: row for row in found.rows(plan, component)}
    assert rows["turns"]["wanted"] == rows["turns"]["got"] == [2, 2, 2]
    assert rows["shared_prefix_tokens"]["wanted"] == [100, 100, 100]
    assert rows["shared_prefix_tokens"]["got"] == [30, 30, 30]
