"""The target's own chat template: what it can express, and its rendering, as servers render it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specfit_data.conversations import Conversation, Message, ToolCall

TemplateMessage = dict[str, Any]  # what a template is given: OpenAI's message, arguments as objects

GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
REASONING_NAMES = frozenset({"reasoning_content", "reasoning", "thinking"})

# The form of tools for a template that knows nothing of them.
TOOLS_PREAMBLE = "You may call these functions, given as JSON schemas:"
TOOLS_FORM = 'To call one, answer with <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'


class RenderError(Exception):
    """One conversation that the template cannot express, or whose turns cannot be located."""


@dataclass(frozen=True)
class _Abilities:
    tools: bool  # schemas are written by the template
    tool_calls: bool
    reasoning: bool
    developer: bool
    generation: bool  # it marks what the assistant generates


@lru_cache
def _abilities(template: str) -> _Abilities:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(GENERATION_TAG.sub("", template))
    words = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    words |= {c.value for c in tree.find_all(jinja2.nodes.Const) if isinstance(c.value, str)}
    return _Abilities(
        tools="tools" in jinja2.meta.find_undeclared_variables(tree),
        tool_calls="tool_calls" in words,
        reasoning=bool(words & REASONING_NAMES),
        developer="developer" in words,
        generation=GENERATION_TAG.search(template) is not None,
    )


class ChatTemplate:
    """The template that a tokenizer picks for a conversation, and the conversation in its terms.

    A system prompt of our own is never added, with one exception: when there are tools and the
    template does not read `tools`, their schemas go to the end of the system message (a new one if
    there is none), after TOOLS_PREAMBLE and one a line, followed by TOOLS_FORM. Where it does not
    read `tool_calls`, calls are appended to the content in that form. Reasoning that it does not
    read is put before the content, between <think> and </think>.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> None:
        self._tokenizer = tokenizer
        tools = list(conversation.tools) or None
        self._template: str = tokenizer.get_chat_template(tools=tools)
        self._abilities = _abilities(self._template)
        self._tools = tools if self._abilities.tools else None
        self.marks_generation = self._abilities.generation
        self.reads_tools = self._abilities.tools
        self.messages = [self._message(m) for m in conversation.messages]
        if tools and not self._abilities.tools:
            _add_schemas(self.messages, tools)
        # 1 when the schemas became a message of their own, in front of the conversation's.
        self.num_added = len(self.messages) - len(conversation.messages)

    def render(self, messages: list[TemplateMessage], add_generation_prompt: bool) -> str:
        """The text that a server would make of `messages`, before tokenization.

        Raises:
            RenderError: the template refuses them; the message is the template's own.
        """
        with _refusals():
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
            return text

    def render_generation(
        self, messages: list[TemplateMessage], add_generation_prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `render`, and the character spans of the template's generation blocks."""
        with _refusals():
            texts, spans = render_jinja_template(
                [messages],
                tools=self._tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.special_tokens_map,
            )
        return texts[0], [tuple(span) for span in spans[0]]

    def _message(self, message: Message) -> TemplateMessage:
        role = message.role
        if role == "developer" and not self._abilities.developer:
            role = "system"
        content = message.content
        if message.reasoning and not self._abilities.reasoning:
            content = f"<think>\n{message.reasoning}\n</think>\n\n{content}"
        if message.tool_calls and not self._abilities.tool_calls:
            content = "\n".join(
                [content] * bool(content) + [_as_text(c) for c in message.tool_calls]
            )
        rendered: TemplateMessage = {"role": role, "content": content}
        if message.reasoning and self._abilities.reasoning:
            rendered["reasoning_content"] = message.reasoning
        if message.tool_calls and self._abilities.tool_calls:
            rendered["tool_calls"] = [_as_openai(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            rendered["tool_call_id"] = message.tool_call_id
        return rendered


def _as_openai(call: ToolCall) -> TemplateMessage:
    identity = {} if call.id is None else {"id": call.id}
    function = {"name": call.name, "arguments": call.arguments}
    return {**identity, "type": "function", "function": function}


def _as_text(call: ToolCall) -> str:
    function = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _add_schemas(messages: list[TemplateMessage], tools: list[dict[str, Any]]) -> None:
    schemas = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    text = "\n".join([TOOLS_PREAMBLE, *schemas]) + "\n\n" + TOOLS_FORM
    if messages[0]["role"] == "system":
        said = messages[0]["content"]
        messages[0] = {**messages[0], "content": f"{said}\n\n{text}" if said else text}
    else:
        messages.insert(0, {"role": "system", "content": text})


@contextmanager
def _refusals() -> Iterator[None]:
    # A template is code from the checkpoint: it raises on purpose, and whatever Python raises.
    try:
        yield
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise RenderError(f"the template refuses it: {error}") from error
