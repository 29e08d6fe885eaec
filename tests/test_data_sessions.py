import pytest

from specfit_data.conversations import Conversation, Message, ToolCall, conversation_id
from specfit_data.sessions import (
    Session,
    compose,
    prefix_text,
    session_of,
    with_prefix,
)

SYSTEM, HI, BYE = Message("system", "Be brief."), Message("user", "Hi"), Message("user", "Bye")
HELLO, SEE_YOU = Message("assistant", "Hello."), Message("assistant", "See you.")
CALL = Message("assistant", "", tool_calls=(ToolCall("c1", "weather", {}),))
RESULT = Message("tool", "21 C", tool_call_id="c1")


def talk(*messages: Message, tools: tuple[dict, ...] = (), **fields: object) -> Conversation:
    id_ = conversation_id(messages, tools)
    return Conversation(messages, tools, id_, "test", "MIT", **fields)


def tool(name: str, description: str = "") -> dict:
    return {"type": "function", "function": {"name": name, "description": description}}


def words(text: str) -> int:
    return len(text.split())


def test_the_first_request_goes_up_to_the_first_answer_and_users_follow_it_up():
    chat = talk(SYSTEM, HI, HELLO, BYE)
    assert session_of(chat) == Session(
        Conversation((SYSTEM, HI, HELLO), (), chat.id, "test", "MIT"), ((BYE,),)
    )


def test_a_conversation_of_one_turn_is_a_session_of_one_request_with_its_answer():
    chat = talk(HI, HELLO)
    assert session_of(chat) == Session(chat)


def test_the_answer_of_the_source_is_no_part_of_the_first_request():
    assert session_of(talk(SYSTEM, HI, HELLO, BYE)).request == (SYSTEM, HI)
    assert session_of(talk(SYSTEM, HI)).request == (SYSTEM, HI)


def test_results_of_tools_are_follow_ups_and_calls_are_left_out():
    chat = talk(HI, CALL, RESULT, HELLO, BYE, SEE_YOU)
    assert session_of(chat).follow_ups == ((RESULT,), (BYE,))


def test_messages_without_an_answer_between_are_one_turn():
    assert session_of(talk(HI, BYE, HELLO, BYE, HI)).request == (HI, BYE)
    assert session_of(talk(HI, BYE, HELLO, BYE, HI)).follow_ups == ((BYE, HI),)


def test_answers_without_a_message_between_are_one_answer():
    session = session_of(talk(HI, HELLO, SEE_YOU, BYE, HELLO, SEE_YOU))
    assert (session.request, session.follow_ups) == ((HI,), ((BYE,),))


def test_an_assistant_message_before_the_first_question_belongs_to_the_first_request():
    session = session_of(talk(HELLO, HI, SEE_YOU, BYE))
    assert (session.request, session.follow_ups) == ((HELLO, HI), ((BYE,),))


def test_turns_that_have_no_answers_in_the_source_come_after_those_that_have():
    chat = talk(HI, HELLO, BYE, follow_ups=((HI, BYE), (HI,)))
    assert session_of(chat).follow_ups == ((BYE,), (HI, BYE), (HI,))
    assert session_of(chat).first.follow_ups == ()


@pytest.mark.parametrize(("num_turns", "left"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_a_session_is_shortened_to_as_many_requests(num_turns, left):
    session = session_of(talk(HI, follow_ups=((HI,), (BYE,))))
    assert session.shortened(num_turns).follow_ups == ((HI,), (BYE,))[:left]


def test_other_conversations_follow_with_their_first_question_alone():
    other = talk(SYSTEM, BYE, SEE_YOU, HI)
    session = compose(session_of(talk(SYSTEM, HI, HELLO)), [talk(HI), other])
    assert session.request == (SYSTEM, HI)
    assert session.follow_ups == ((HI,), (BYE,))
    assert session.num_composed == 2


def test_a_session_of_several_conversations_offers_each_tool_once_in_order():
    first = talk(HI, tools=(tool("b", "first"), tool("a")))
    others = [talk(BYE, tools=(tool("c"), tool("b", "second"))), talk(BYE, tools=(tool("d"),))]
    tools = compose(session_of(first), others).first.tools
    assert tools == (tool("b", "first"), tool("a"), tool("c"), tool("d"))


def test_nothing_is_added_by_no_others():
    session = session_of(talk(HI, HELLO, BYE))
    assert compose(session, []) == session


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((SYSTEM, HI, HELLO), "You write code.\n\nBe brief."),
        ((HI, HELLO), "You write code."),
        ((Message("system", ""), HI, HELLO), "You write code."),
    ],
)
def test_a_prefix_stands_before_the_system_message_and_in_it(messages, expected):
    session = with_prefix(session_of(talk(*messages)), "You write code.")
    assert session.first.messages == (Message("system", expected), HI, HELLO)


def test_a_prefix_changes_neither_the_id_nor_the_follow_ups():
    session = session_of(talk(SYSTEM, HI, HELLO, BYE))
    prefixed = with_prefix(session, "You write code.")
    assert prefixed.first.id == session.first.id
    assert prefixed.follow_ups == session.follow_ups


def test_a_prefix_of_any_length_is_the_beginning_whose_length_is_closest():
    longest = 900
    whole = prefix_text(longest, words)
    ends = [len(whole)] + [i for i, c in enumerate(whole) if c == "\n"]
    ends += [i + 1 for i, c in enumerate(whole) if c in ".:!?" and whole[i + 1 : i + 2].isspace()]
    lengths = sorted({words(whole[:end]) for end in ends} - {0})
    for num in range(1, 800):
        closest = min(abs(length - num) for length in lengths)
        assert abs(words(prefix_text(num, words)) - num) == closest, num


def test_a_shorter_prefix_begins_a_longer_one_and_ends_where_a_sentence_or_line_does():
    short, long = prefix_text(100, words), prefix_text(300, words)
    assert long.startswith(short)
    assert short[-1] in ".:" or long[len(short)] == "\n"


def test_all_of_the_text_is_the_longest_prefix_whatever_is_asked_for():
    assert words(prefix_text(1334, words)) == 1334
    assert words(prefix_text(9999, words)) == 1334
