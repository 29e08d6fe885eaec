"""What a later request of a session adds, on the structures of templates that are in use."""

import pytest
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

from specfit_data.conversations import Message
from specfit_data.render import RenderError
from specfit_data.sessions import Session, session_of

ASKED, ANSWER, BACK = user("Hi"), says("Hello."), user("Bye")
END = {
    "chatml": "<|im_end|>",
    "chatml_generation": "<|im_end|>",
    "llama31": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "r1": "</s>",
    "phi3": "<|end|>",
    "harmony": "<|end|>",
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_follow_up_is_what_a_server_reads_behind_the_answer(name):
    whole = renderer(name).prompt(talk(ASKED, ANSWER, BACK), "all_turns")
    [(_, end)] = whole.spans
    session = session_of(talk(ASKED, ANSWER, BACK))
    assert renderer(name).follow_up(session, 0) == whole.input_ids[end:]


@pytest.mark.parametrize("name", sorted(SPECIAL.keys() - {"r1"}))  # whose prompt opens a thought
def test_a_request_its_answer_and_the_follow_up_are_the_next_request(name):
    session = session_of(talk(ASKED, follow_ups=((BACK,), (ASKED,))))
    tokens = renderer(name).prompt(session.first, "all_turns").input_ids
    for i in range(2):
        whole = renderer(name).prompt(
            talk(*_answered(session, i), *session.follow_ups[i]), "all_turns"
        )
        start, end = whole.spans[-1]
        answer = whole.input_ids[start:end]
        tokens = tokens + answer + renderer(name).follow_up(session, i)
        assert tokens == whole.input_ids


def _answered(session: Session, num: int) -> list[Message]:
    messages = [*session.request, ANSWER]
    for added in session.follow_ups[:num]:
        messages += [*added, ANSWER]
    return messages


def test_the_answer_of_the_source_does_not_count_for_the_follow_up():
    one, other = talk(ASKED, ANSWER, BACK), talk(ASKED, says("Something else\n\n"), BACK)
    follow_ups = [renderer("chatml").follow_up(session_of(chat), 0) for chat in (one, other)]
    assert follow_ups[0] == follow_ups[1]
    text = tokenizer_of("chatml").decode(follow_ups[0])
    assert text == "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama31", "mistral"])
def test_the_result_of_a_tool_follows_a_call(name):
    chat = talk(user("Rome?"), calls("Rome"), result("21 C"), tools=(WEATHER,))
    whole = renderer(name).prompt(chat, "all_turns")
    [(_, end)] = whole.spans
    assert renderer(name).follow_up(session_of(chat), 0) == whole.input_ids[end:]


def test_a_template_that_repeats_the_answer_has_no_follow_up():
    template = (TEMPLATES / "chatml.jinja").read_text()
    template += "{% if messages[1] %}{{ messages[1].content[:2] }}{% endif %}"
    with pytest.raises(RenderError, match="follow-up 0 depends on the answer"):
        renderer("chatml", template=template).follow_up(session_of(talk(ASKED, ANSWER, BACK)), 0)


# gpt-oss names the function that was called where it gives the result.
def test_a_result_that_names_its_call_has_no_follow_up():
    chat = talk(user("Rome?"), calls("Rome"), result("21 C"), tools=(WEATHER,))
    with pytest.raises(RenderError, match="follow-up 0 depends on the answer"):
        renderer("harmony").follow_up(session_of(chat), 0)


@pytest.mark.parametrize("name", SPECIAL)
def test_an_answer_that_is_cut_short_is_ended_as_in_history(name):
    end_ids = renderer(name).end_of_turn(session_of(talk(ASKED, ANSWER, BACK)))
    assert tokenizer_of(name).decode(end_ids) == END[name]


def test_a_session_that_does_not_go_on_has_no_end_of_a_turn():
    assert renderer("chatml").end_of_turn(session_of(talk(ASKED, ANSWER))) == []
