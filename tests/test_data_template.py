"""The text that a template makes of a conversation; the tokens do not matter here."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specfit_data.conversations import Conversation, Message, ToolCall
from specfit_data.template import ChatTemplate, RenderError

TEMPLATES = Path(__file__).parent / "templates"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
SYSTEM, HI = Message("system", "Be brief."), Message("user", "Hi")


def text_of(
    template: str | dict[str, str], *messages: Message, tools: tuple[dict, ...] = ()
) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = template
    chat = ChatTemplate(tokenizer, Conversation(messages, tools, "id", "test", "MIT"))
    return chat.render(chat.messages, True)


def file(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


# SpecForge#484: a system prompt of the trainer's own is inserted, or inserted twice.
def test_nothing_is_added_to_what_the_template_makes():
    assert text_of(file("chatml"), HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_system_prompt_of_the_template_is_there_once():
    text = text_of("{{ 'I am new. ' }}" + file("chatml"), SYSTEM, HI)
    assert text.startswith("I am new. <|im_start|>system\nBe brief.<|im_end|>")
    assert text.count("I am new.") == text.count("system") == 1


# speculators#907: unknown roles (developer, …) dropped silently.
def test_a_developer_message_is_a_system_message_where_the_template_has_no_developer():
    text = text_of(file("chatml"), Message("developer", "Be brief."), HI)
    assert text == text_of(file("chatml"), SYSTEM, HI)


def test_a_developer_message_stays_one_where_the_template_has_it():
    text = text_of(file("harmony"), Message("developer", "Be brief."), HI)
    assert text.startswith("<|start|>developer<|message|>Be brief.<|end|>")


def test_schemas_go_into_the_one_system_message_when_the_template_knows_no_tools():
    text = text_of(file("chatml"), SYSTEM, HI, tools=(WEATHER,))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call these functions")
    assert text.count('"name": "weather"') == text.count("<|im_start|>system") == 1


def test_schemas_are_left_to_a_template_that_knows_tools():
    text = text_of(file("qwen3"), SYSTEM, HI, tools=(WEATHER,))
    assert "You may call" not in text
    assert text.count('"name": "weather"') == 1


def test_a_template_for_tools_is_taken_when_there_are_tools():
    templates = {"default": file("chatml"), "tool_use": file("qwen3")}
    assert "<tools>" not in text_of(templates, HI)
    assert "<tools>" in text_of(templates, HI, tools=(WEATHER,))


def test_reasoning_is_put_into_the_content_when_the_template_does_not_read_it():
    thinker = Message("assistant", "Hello.", reasoning="A greeting.")
    assert "assistant\n<think>\nA greeting.\n</think>\n\nHello.<|im_end|>" in text_of(
        file("chatml"), HI, thinker
    )


def test_calls_are_appended_to_the_content_when_the_template_does_not_read_them():
    caller = Message("assistant", "Look.", tool_calls=(ToolCall(None, "weather", {"city": "Åre"}),))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Åre"}}\n</tool_call>'
    assert f"Look.\n{call}<|im_end|>" in text_of(file("chatml"), HI, caller)


def test_what_a_template_refuses_is_an_error_in_its_own_words():
    with pytest.raises(RenderError, match="System role not supported"):
        text_of(file("gemma"), SYSTEM, HI)


def test_what_breaks_inside_a_template_is_an_error_of_that_conversation():
    with pytest.raises(RenderError, match="refuses it"):
        text_of("{{ messages[0].missing + 1 }}", HI)
