"""Which text is learned, on the structures of templates that are in use."""

import pytest
import torch
from chat_templates import (
    SPECIAL,
    TEMPLATES,
    WEATHER,
    calls,
    renderer,
    result,
    says,
    talk,
    tokenizer_of,
    user,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specfit_data.conversations import Message
from specfit_data.render import Rendered, Renderer, RenderError


def learned(name: str, rendered: Rendered, **options: object) -> list[str]:
    tokenizer = tokenizer_of(name, **options)
    return [
        tokenizer.decode(rendered.input_ids[start:end], clean_up_tokenization_spaces=False)
        for start, end in rendered.spans
    ]


def learned_of(name: str, *messages: Message, tools: bool = False, **options: object) -> list[str]:
    chat = talk(*messages, tools=(WEATHER,) if tools else ())
    return learned(name, renderer(name, **options).full(chat, "all_turns"), **options)


TWO_TURNS = (user("Hi"), says("Hello."), user("Bye"), says("See you."))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["Hello.<|im_end|>", "See you.<|im_end|>"]),
        ("chatml_generation", ["Hello.<|im_end|>", "See you.<|im_end|>"]),
        ("llama31", ["Hello.<|eot_id|>", "See you.<|eot_id|>"]),
        ("qwen3", ["Hello.<|im_end|>", "<think>\n\n</think>\n\nSee you.<|im_end|>"]),
        ("mistral", [" Hello.</s>", " See you.</s>"]),
        ("gemma", ["Hello.<end_of_turn>", "See you.<end_of_turn>"]),
        ("r1", ["Hello.</s>", "See you.</s>"]),
        ("phi3", ["Hello.<|end|>", "See you.<|end|>"]),
        (
            "harmony",
            [
                "<|channel|>final<|message|>Hello.<|end|>",
                "<|channel|>final<|message|>See you.<|return|>",
            ],
        ),
    ],
)
def test_every_turn_is_learned_with_the_token_that_ends_it(name, expected):
    assert learned_of(name, *TWO_TURNS) == expected


@pytest.mark.parametrize("name", ["chatml", "chatml_generation", "llama31", "qwen3", "mistral"])
def test_a_system_message_does_not_change_what_is_learned(name):
    with_system = learned_of(name, Message("system", "Be brief."), *TWO_TURNS)
    assert with_system == learned_of(name, *TWO_TURNS)


def test_a_template_without_a_system_role_refuses_it_with_its_own_words():
    with pytest.raises(RenderError, match="System role not supported"):
        learned_of("gemma", Message("system", "Be brief."), *TWO_TURNS)


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        (
            "llama31",
            '{"name": "weather", "parameters": {"city": "CITY"}}<|eot_id|>',
            "SAID<|eot_id|>",
        ),
        (
            "qwen3",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "CITY"}}\n</tool_call>'
            "<|im_end|>",
            "SAID<|im_end|>",
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "CITY"}, '
            '"id": "call00000"}]</s>',
            " SAID</s>",
        ),
        ("r1", '<|call|>weather<|sep|>{"city": "CITY"}<|/call|></s>', "SAID</s>"),
        (
            "harmony",
            ' to=weather<|channel|>commentary<|message|>{"city": "CITY"}<|call|>',
            "<|channel|>final<|message|>SAID<|end|>",
        ),
    ],
)
def test_tool_calls_are_learned_and_results_are_not(name, call, answer):
    messages = [user("Rome?"), calls("Rome"), result("21 C"), says("Sunny.")]
    messages += [user("Oslo?"), calls("Oslo"), result("9 C"), says("Rain."), user("Thanks")]
    prompt = renderer(name).prompt(talk(*messages, tools=(WEATHER,)), "all_turns")
    assert learned(name, prompt) == [
        call.replace("CITY", "Rome"),
        answer.replace("SAID", "Sunny."),
        call.replace("CITY", "Oslo"),
        answer.replace("SAID", "Rain."),
    ]


def test_several_calls_and_results_are_one_turn_each():
    messages = [user("Both?"), calls("Rome", "Oslo", content="Let me look.")]
    messages += [result("21 C"), result("", call=1), says("Sunny and unknown.")]
    assert learned_of("qwen3", *messages, tools=True) == [
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call><|im_end|>",
        "<think>\n\n</think>\n\nSunny and unknown.<|im_end|>",
    ]


def test_a_turn_that_hands_over_to_an_environment_ends_with_its_own_token():
    template = "{% set builtin = true %}" + (TEMPLATES / "llama31.jinja").read_text()
    messages = [user("Rome?"), calls("Rome"), result("21 C"), says("Sunny.")]
    assert learned_of("llama31", *messages, template=template) == [
        '<|python_tag|>weather.call(city="Rome")<|eom_id|>',
        "Sunny.<|eot_id|>",
    ]


def test_a_template_that_takes_one_call_refuses_two():
    with pytest.raises(RenderError, match="one call at a time"):
        learned_of("llama31", user("Both?"), calls("Rome", "Oslo"), tools=True)


# speculators#346: thinking tokens not trained.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", "<think>\nA farewell.\n</think>\n\nSee you.<|im_end|>"),
        ("chatml", "<think>\nA farewell.\n</think>\n\nSee you.<|im_end|>"),
        ("r1", "A farewell.\n</think>\n\nSee you.</s>"),
        (
            "harmony",
            "<|channel|>analysis<|message|>A farewell.<|end|><|start|>assistant<|channel|>final"
            "<|message|>See you.<|return|>",
        ),
    ],
)
def test_the_reasoning_of_the_last_turn_is_learned(name, expected):
    asked = [user("Hi"), says("Hello.", "A greeting."), user("Bye")]
    assert learned_of(name, *asked, says("See you.", "A farewell."))[-1] == expected


# speculators#774, #943, #975: the rendering of turns 1..k is no prefix of that of the whole.
@pytest.mark.parametrize(
    ("name", "expected"), [("qwen3", "Hello.<|im_end|>"), ("r1", "Hello.</s>")]
)
def test_a_turn_whose_reasoning_is_dropped_from_history_is_learned_as_it_stands(name, expected):
    messages = [user("Hi"), says("Hello.", "A greeting."), user("Bye"), says("See you.", "Go.")]
    assert learned_of(name, *messages)[0] == expected


def test_reasoning_between_tool_calls_is_learned_where_the_template_keeps_it():
    messages = [user("Rome?"), calls("Rome", reasoning="Look it up."), result("21 C")]
    assert learned_of("qwen3", *messages, says("Sunny.", "Warm."), tools=True) == [
        '<think>\nLook it up.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": '
        '{"city": "Rome"}}\n</tool_call><|im_end|>',
        "<think>\nWarm.\n</think>\n\nSunny.<|im_end|>",
    ]


def test_reasoning_inside_the_content_is_split_off_by_the_template_as_in_serving():
    messages = [user("Hi"), says("<think>\nA greeting.\n</think>\n\nHello.")]
    assert learned_of("qwen3", *messages) == ["<think>\nA greeting.\n</think>\n\nHello.<|im_end|>"]


def test_the_whole_is_the_prompt_and_the_answer_where_the_template_forgets_the_system_message():
    template = (TEMPLATES / "mistral.jinja").read_text()
    template = template.replace("loop.index0 == last.question and instr", "loop.last and instr")
    chat = talk(Message("system", "Be brief."), *TWO_TURNS)
    prompt = renderer("mistral", template=template).prompt(chat, "all_turns")
    full = renderer("mistral", template=template).full(chat, "all_turns")
    assert full.text == prompt.text + " See you.</s>"
    assert "Be brief." in full.text


def test_a_header_that_history_writes_otherwise_is_not_learned():  # Hermes 2
    template = (TEMPLATES / "chatml.jinja").read_text()
    end = "('' if loop.last and add_generation_prompt else '<|im_end|>\\n')"
    template = template.replace("'<|im_end|>\\n'", end)
    assert learned_of("chatml", *TWO_TURNS, template=template)[0] == "Hello.<|im_end|>"


def test_a_header_that_follows_every_message_is_not_learned():  # Command R7B
    template = (TEMPLATES / "chatml.jinja").read_text().replace("<|im_end|>\\n", "<|im_end|><|x|>")
    assert learned_of("chatml", *TWO_TURNS, template=template)[0] == "Hello.<|im_end|>"


# speculators#561, Automodel#3371: tool calls and tool turns dropped silently by a role filter.
def test_a_template_that_drops_a_message_is_an_error():
    template = (TEMPLATES / "chatml.jinja").read_text()
    template = template.replace(
        "{%- for m in messages -%}", "{%- for m in messages if m.role != 'tool' -%}"
    )
    messages = [user("Rome?"), calls("Rome"), result("21 C"), says("Sunny.")]
    with pytest.raises(RenderError, match=r"message 2 \(tool\): the template drops it"):
        learned_of("chatml", *messages, template=template)


def test_a_template_that_drops_the_second_call_is_an_error():
    template = (TEMPLATES / "qwen3.jinja").read_text()
    template = template.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    with pytest.raises(RenderError, match="drops a tool call"):
        learned_of("qwen3", user("Both?"), calls("Rome", "Oslo"), tools=True, template=template)


# speculators#210, SpecForge#392: an expression that does not match leaves nothing to learn.
def test_a_template_without_a_token_that_ends_a_turn_is_an_error():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    with pytest.raises(RenderError, match="no special token ends it"):
        learned_of("chatml", *TWO_TURNS, template=template)


def test_a_conversation_that_begins_with_an_assistant_turn_is_an_error():
    with pytest.raises(RenderError, match="begins with an assistant turn"):
        learned_of("chatml", says("Hello."), user("Hi"), says("Again."))


def test_an_assistant_turn_that_says_nothing_is_an_error():
    with pytest.raises(RenderError, match="message 1"):
        learned_of("chatml", user("Hi"), says(""))


def test_schemas_make_a_system_message_when_there_is_none_and_turns_stay_right():
    messages = [user("Rome?"), calls("Rome"), result("21 C"), says("Sunny.")]
    assert learned_of("chatml", *messages, tools=True) == [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
        "Sunny.<|im_end|>",
    ]


# SpecForge#419, TorchSpec#37: users want loss on the last turn only.
@pytest.mark.parametrize("name", ["chatml", "chatml_generation", "qwen3"])
def test_last_turn_keeps_the_last_assistant_turn_only(name):
    full = renderer(name).full(talk(*TWO_TURNS), "last_turn")
    assert learned(name, full) == learned_of(name, *TWO_TURNS)[-1:]


def test_a_prompt_learns_its_history_unless_only_the_last_turn_counts():
    chat = talk(*TWO_TURNS)
    prompts = [renderer("chatml").prompt(chat, on) for on in ("all_turns", "last_turn")]
    assert [learned("chatml", p) for p in prompts] == [["Hello.<|im_end|>"], []]


def test_turns_that_are_flagged_as_context_are_not_learned():
    messages = [user("Hi"), says("Hello.", learn=False), user("Bye"), says("See you.")]
    assert learned_of("chatml", *messages) == ["See you.<|im_end|>"]


# ModelOpt#2172: transformers 5 gives a BatchEncoding where a list was expected.
def test_tokens_are_a_list_of_ids_that_decodes_to_the_text():
    full = renderer("chatml").full(talk(*TWO_TURNS), "all_turns")
    assert all(type(token) is int for token in full.input_ids)
    assert tokenizer_of("chatml").decode(full.input_ids) == full.text


# ModelOpt#1211, Megatron-Bridge#3927: without generation blocks the mask is all zero, or all one.
def test_generation_blocks_and_their_absence_give_the_same_mask():
    chat = talk(Message("system", "Be brief."), *TWO_TURNS)
    masks = [renderer(n).full(chat, "all_turns") for n in ("chatml", "chatml_generation")]
    assert masks[0] == masks[1]
    mask = masks[0].tokenized().loss_mask
    assert mask.any()
    assert not mask.all()


# EAGLE#340: the loss is a mean over padded positions. Nothing is padded here.
def test_the_mask_is_as_long_as_the_tokens_and_counts_the_learned_ones_only():
    full = renderer("chatml").full(talk(*TWO_TURNS), "all_turns")
    tokenized = full.tokenized()
    assert tokenized.input_ids.tolist() == full.input_ids
    assert tokenized.loss_mask.shape == tokenized.input_ids.shape
    assert tokenized.loss_mask.dtype == torch.bool
    assert int(tokenized.loss_mask.sum()) == sum(end - start for start, end in full.spans)


def test_the_prompt_and_what_is_learned_of_the_last_turn_are_the_whole():
    for name in SPECIAL.keys() - {"r1"}:  # whose prompt opens a thought that this turn has not
        chat = talk(user("Hi"), says("Hello."))
        prompt = renderer(name).prompt(chat, "all_turns")
        full = renderer(name).full(chat, "all_turns")
        assert full.spans == [(len(prompt.input_ids), len(full.input_ids))], name
        assert full.input_ids[: len(prompt.input_ids)] == prompt.input_ids, name


def test_a_prompt_ends_where_the_model_has_to_speak_also_after_a_tool_result():
    chat = talk(user("Rome?"), calls("Rome"), result("21 C"), tools=(WEATHER,))
    text = renderer("mistral").prompt(chat, "all_turns").text
    assert text.endswith('[TOOL_RESULTS] {"content": 21 C, "call_id": "call00000"}[/TOOL_RESULTS]')


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_token_that_straddles_the_start_of_a_turn_is_not_learned(trim_offsets):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    options = {"trim_offsets": trim_offsets, "template": template}
    # The prompt ends in a space, which the tokenizer puts into the first token of the answer.
    assert learned_of("chatml", user("hi"), says("the sun"), **options) == [" sun<|im_end|>"]


@pytest.mark.parametrize("content", ["  indented\n", "é→🙂", "a", "<|im_end|> in the text", "\n\n"])
def test_any_text_of_the_user_leaves_the_answer_learned(content):
    assert learned_of("chatml", user("Hi"), says("A."), user(content), says("B.")) == [
        "A.<|im_end|>",
        "B.<|im_end|>",
    ]


def test_a_users_message_in_the_form_of_a_tool_result_is_rendered_as_in_serving():
    messages = [user("Rome?"), calls("Rome"), user("<tool_response>21 C</tool_response>")]
    assert learned_of("qwen3", *messages, says("Sunny."))[-1] == (
        "<think>\n\n</think>\n\nSunny.<|im_end|>"
    )


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="must have a chat template"):
        Renderer(tokenizer)
