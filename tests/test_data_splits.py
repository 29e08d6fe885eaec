from collections import Counter

from specfit_data.conversations import Conversation, Message, conversation_id
from specfit_data.splits import split_of, without_duplicates

SYSTEM, HI = Message("system", "Be brief."), Message("user", "Hi")


def talk(*messages: Message, source: str = "a") -> Conversation:
    return Conversation(messages, (), conversation_id(messages, ()), source, "MIT")


def test_the_split_of_an_id_never_changes():
    assert conversation_id([HI], []) == "a09a19a6910edb36-a09a19a6910edb36"
    splits = [split_of(f"{i}-x") for i in range(4)]
    assert splits == ["test", "train", "train", "train"]
    assert split_of("9-x") == "validation"


def test_splits_have_their_shares():
    counts = Counter(split_of(f"{i}-x") for i in range(10_000))
    assert abs(counts["train"] - 8000) < 200
    assert abs(counts["validation"] - 500) < 100
    assert abs(counts["test"] - 1500) < 150


def test_what_is_held_out_is_always_in_the_test():
    assert {split_of(f"{i}-x", held_out=True) for i in range(100)} == {"test"}


def test_another_seed_splits_otherwise():
    splits = [[split_of(f"{i}-x", seed=seed) for i in range(100)] for seed in (0, 1)]
    assert splits[0] != splits[1]


def test_all_requests_of_a_session_are_in_one_split():
    first = [SYSTEM, HI]
    second = [*first, Message("assistant", "Hello."), Message("user", "Bye")]
    ids = [conversation_id(messages, []) for messages in (first, second)]
    assert ids[0] != ids[1]
    assert len({id_.partition("-")[0] for id_ in ids}) == 1


def test_answers_and_spacing_do_not_make_another_conversation():
    one = talk(HI, Message("assistant", "Hello."))
    other = talk(Message("user", " Hi\n"), Message("assistant", "Hey!"), source="b")
    assert list(without_duplicates([one, other], set())) == [one]


def test_tools_and_system_messages_make_another_conversation():
    tool = {"type": "function", "function": {"name": "f"}}
    ids = [
        conversation_id([HI], []),
        conversation_id([SYSTEM, HI], []),
        conversation_id([HI], [tool]),
    ]
    assert len(set(ids)) == 3


def test_what_was_seen_in_one_source_is_left_out_of_the_next():
    seen: set[str] = set()
    assert len(list(without_duplicates([talk(HI)], seen))) == 1
    assert list(without_duplicates([talk(HI, source="b")], seen)) == []
