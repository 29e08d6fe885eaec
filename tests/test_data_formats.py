import ast
import json

import pytest

from specfit_data.conversations import Conversation, Message, ToolCall, conversation_id
from specfit_data.formats import FormatError, conversation
from specfit_data.sources import Format, Source

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
OPENAI_WEATHER = {"type": "function", "function": WEATHER}
CALL = ToolCall("c1", "weather", {"city": "Rome"})


def parsed(row: dict, form: str, **fields: object) -> Conversation:
    return conversation(row, Source(path="", format=Format[form], licence="MIT", **fields), "mine")


def messages_of(*turns: dict) -> tuple[Message, ...]:
    return parsed({"messages": list(turns)}, "messages").messages


USER = {"role": "user", "content": "Rome?"}


def test_messages_keep_tool_calls_results_and_reasoning():
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": {"city": "Rome"}}
    assert messages_of(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Look."},
        {"role": "tool", "tool_call_id": "c1", "content": "21 C"},
    ) == (
        Message("user", "Rome?"),
        Message("assistant", "", tool_calls=(CALL,), reasoning="Look."),
        Message("tool", "21 C", tool_call_id="c1"),
    )


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
def test_arguments_may_be_an_object_or_json(arguments):
    call = {"id": "c1", "function": {"name": "weather", "arguments": arguments}}
    assistant = {"role": "assistant", "tool_calls": [call]}
    assert messages_of(USER, assistant)[1].tool_calls == (CALL,)


@pytest.mark.parametrize("arguments", ["[1]", '{"city": ', 7])
def test_arguments_that_are_no_object_are_rejected(arguments):
    call = {"id": "c1", "function": {"name": "weather", "arguments": arguments}}
    with pytest.raises(FormatError, match="turn 1"):
        messages_of(USER, {"role": "assistant", "tool_calls": [call]})


def test_the_older_form_of_one_call_and_its_result_is_read():
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    turns = messages_of(
        USER, {"role": "assistant", "function_call": call}, {"role": "function", "content": "21 C"}
    )
    assert turns[1].tool_calls == (ToolCall(None, "weather", {"city": "Rome"}),)
    assert turns[2].role == "tool"


def test_columns_may_hold_json_in_strings():
    row = {"trajectory": json.dumps([USER]), "schemas": json.dumps([OPENAI_WEATHER])}
    columns = {"messages": "trajectory", "tools": "schemas"}
    chat = parsed(row, "messages", columns=columns)
    assert (chat.messages, chat.tools) == ((Message("user", "Rome?"),), (OPENAI_WEATHER,))


def test_the_parts_of_a_content_are_joined_by_line_ends():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of({"role": "user", "content": parts})[0].content == "a\nb"


def test_a_part_that_is_not_text_is_rejected():
    with pytest.raises(FormatError, match="part that is not text"):
        messages_of({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})


# speculators#907: unknown roles dropped silently.
def test_an_unknown_role_is_rejected():
    with pytest.raises(FormatError, match="turn 1: unknown role narrator"):
        messages_of(USER, {"role": "narrator", "content": "x"})


# ModelOpt#1293: `conversations` and `messages` confused.
def test_turns_in_another_form_are_rejected_with_the_keys_that_are_there():
    with pytest.raises(FormatError, match="turn 0 has no role, but from, value"):
        messages_of({"from": "human", "value": "Hi"})


@pytest.mark.parametrize("assistant", ["gpt", "chatgpt", "bing", "bard", "assistant"])
def test_sharegpt_roles_have_many_names(assistant):
    turns = [{"from": "human", "value": "Hi"}, {"from": assistant, "value": "Hello."}]
    assert parsed({"conversations": turns}, "sharegpt").messages == (
        Message("user", "Hi"),
        Message("assistant", "Hello."),
    )


def test_an_empty_system_turn_of_a_data_set_is_none():
    turns = [{"from": "system", "value": ""}, {"from": "human", "value": "Hi"}]
    assert parsed({"conversations": turns}, "sharegpt").messages == (Message("user", "Hi"),)


def test_an_empty_system_message_of_a_request_is_kept():
    request = {"messages": [{"role": "system", "content": ""}, USER]}
    assert parsed({"request": request}, "openai_log").messages[0] == Message("system", "")


def test_a_conversation_without_a_user_is_rejected():
    with pytest.raises(FormatError, match="no user message"):
        messages_of({"role": "assistant", "content": "Hello."})


def test_alpaca_joins_instruction_and_input():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert parsed(row, "alpaca").messages == (
        Message("user", "Add.\n\n1 2"),
        Message("assistant", "3"),
    )


@pytest.mark.parametrize("body", [lambda r: r, lambda r: {"status_code": 200, "body": r}])
def test_a_log_gives_the_request_and_the_first_choice(body):
    row = {
        "request": {"model": "m", "messages": [USER], "tools": [OPENAI_WEATHER]},
        "response": body({"choices": [{"message": {"role": "assistant", "content": "Sunny."}}]}),
    }
    chat = parsed(row, "openai_log")
    assert chat.messages == (Message("user", "Rome?"), Message("assistant", "Sunny."))
    assert chat.tools == (OPENAI_WEATHER,)


def test_a_line_of_a_batch_is_a_prompt():
    row = {"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": [USER]}}
    chat = parsed(row, "openai_log", columns={"request": "body"})
    assert chat.messages == (Message("user", "Rome?"),)


def test_a_failed_response_is_rejected():
    row = {"request": {"messages": [USER]}, "response": {"error": "overloaded"}}
    with pytest.raises(FormatError, match="no choices"):
        parsed(row, "openai_log")


def test_an_instruction_is_filled_with_text_and_nothing_else():
    row = {"a": "{b}", "b": "no"}
    instruction = 'Say {a}; {"json": {}} and {a.__class__} stay.'
    asked = parsed(row, "prompt", instruction=instruction).messages
    assert asked == (Message("user", 'Say {b}; {"json": {}} and {a.__class__} stay.'),)


def test_a_prompt_without_text_is_rejected():
    with pytest.raises(FormatError, match="a holds no text"):
        parsed({"a": None}, "prompt", instruction="{a}")


CODE = '''import math


def half(x):
    return x / 2


def area(radius: float) -> float:
    """The area
    of a circle."""
    # a comment
    return math.pi * radius**2
'''


def test_a_completion_asks_for_the_documented_function_in_the_form_of_humaneval():
    asked, answer = parsed({"code": CODE}, "completion", instruction="{prompt}").messages
    assert asked.content == (
        'import math\n\n\ndef area(radius: float) -> float:\n    """The area\n    of a circle."""\n'
    )
    ast.parse(answer.content.removeprefix("```python\n").removesuffix("\n```"))
    assert answer.content.endswith("    # a comment\n    return math.pi * radius**2\n```")


def test_a_completion_without_a_docstring_gets_the_description():
    row = {"code": "def f(x):\n    return x\n", "description": 'Give """x"""\nback.'}
    (asked, _) = parsed(row, "completion", instruction="{prompt}").messages
    function = ast.parse(asked.content).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert ast.get_docstring(function) == 'Give """x"""\nback.'


@pytest.mark.parametrize("code", ["x = 1", "def f(:", "def f(x):\n    return x"])
def test_code_without_a_function_to_complete_is_rejected(code):
    with pytest.raises(FormatError, match=r"docstring|not Python"):
        parsed({"code": code}, "completion", instruction="{prompt}")


def test_bfcl_schemas_become_json_schemas():
    properties = {"where": {"type": "dict", "properties": {"type": {"type": "float"}}}}
    function = {"name": "f", "parameters": {"type": "dict", "properties": properties}}
    chat = parsed({"question": [[USER]], "function": [function]}, "bfcl")
    parameters = chat.tools[0]["function"]["parameters"]
    assert chat.messages == (Message("user", "Rome?"),)
    assert parameters["type"] == parameters["properties"]["where"]["type"] == "object"
    assert parameters["properties"]["where"]["properties"]["type"] == {"type": "number"}


def test_the_turns_of_bfcl_follow_the_first_which_is_asked_alone():
    turns = [[USER], [{"role": "user", "content": "Oslo?"}], []]
    function = {"name": "f", "parameters": {}}
    chat = parsed({"question": turns, "function": [function]}, "bfcl")
    assert chat.messages == (Message("user", "Rome?"),)
    assert chat.follow_ups == ((Message("user", "Oslo?"),),)


def test_a_question_of_bfcl_without_turns_has_no_follow_ups():
    chat = parsed({"question": [USER], "function": [{"name": "f", "parameters": {}}]}, "bfcl")
    assert (chat.messages, chat.follow_ups) == ((Message("user", "Rome?"),), ())


def test_a_column_of_turns_is_a_question_and_its_follow_ups():
    row = {"turns": ["Rome?", "Oslo?", "And {turns}?"]}
    chat = parsed(row, "prompt", instruction="Where is {turns}")
    assert chat.messages == (Message("user", "Where is Rome?"),)
    assert chat.follow_ups == ((Message("user", "Oslo?"),), (Message("user", "And {turns}?"),))


@pytest.mark.parametrize("later", ["", " \n", None, 7])
def test_a_later_turn_without_text_is_rejected(later):
    with pytest.raises(FormatError, match="turns holds no text"):
        parsed({"turns": ["Rome?", later]}, "prompt", instruction="{turns}")


def test_follow_ups_make_another_conversation_in_the_same_split():
    ids = [
        parsed({"turns": turns}, "prompt", instruction="{turns}").id
        for turns in (["Rome?"], ["Rome?", "Oslo?"], ["Rome?", "Bonn?"])
    ]
    assert len(set(ids)) == 3
    assert len({id_.partition("-")[0] for id_ in ids}) == 1
    assert ids[0] == conversation_id([Message("user", "Rome?")], [])


def test_bare_properties_become_a_schema():
    tools = json.dumps([{"name": "f", "parameters": {"type": {"type": "str"}}}])
    chat = parsed({"q": "Go", "tools": tools}, "prompt", instruction="{q}")
    parameters = chat.tools[0]["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {"type": {"type": "string"}}}


def test_a_trajectory_has_its_system_prompt_apart():
    turns = [
        {"role": "system", "system_prompt": "You fix code.", "text": None},
        {"role": "user", "system_prompt": None, "text": "Fix it."},
        {"role": "ai", "system_prompt": None, "text": "Done."},
    ]
    assert parsed({"trajectory": turns}, "trajectory").messages == (
        Message("system", "You fix code."),
        Message("user", "Fix it."),
        Message("assistant", "Done."),
    )


def test_flags_say_which_turns_are_learned():
    turns = [USER, {"role": "assistant", "content": "No.", "loss": False}]
    turns += [USER, {"role": "assistant", "content": "Yes.", "loss": True}]
    flags = [m.learn for m in parsed({"conversation": turns}, "flagged").messages]
    assert flags == [True, False, True, True]
