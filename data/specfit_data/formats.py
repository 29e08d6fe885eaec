"""From the rows that data sets hold to conversations: one function a format."""

import ast
import inspect
import json
import re
import textwrap
import warnings
from typing import Any, NamedTuple

from specfit_data.conversations import ROLES, Conversation, Message, ToolCall, conversation_id
from specfit_data.sources import Format, Row, Source

ROLE_ALIASES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "ai", "model", "bot"), "assistant"),
    **dict.fromkeys(("function", "tool_response", "observation", "ipython"), "tool"),
}
CALL_ROLES = ("tool_call", "function_call")  # turns whose content is one call, as JSON
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
PLACEHOLDER = re.compile(r"\{(\w+)\}")


class FormatError(Exception):
    """A row that is no conversation; the message is the reason."""


class Field(NamedTuple):
    """What a format reads from a row: the column it is in by default, and whether it must be."""

    column: str
    required: bool = True


FIELDS: dict[Format, dict[str, Field]] = {
    Format.messages: {
        "messages": Field("messages"),
        "tools": Field("tools", required=False),
    },
    Format.sharegpt: {
        "conversations": Field("conversations"),
        "system": Field("system", required=False),
        "tools": Field("tools", required=False),
    },
    Format.alpaca: {
        "instruction": Field("instruction"),
        "input": Field("input", required=False),
        "output": Field("output", required=False),
    },
    Format.openai_log: {
        "request": Field("request"),
        "response": Field("response", required=False),
    },
    Format.prompt: {
        "answer": Field("answer", required=False),
        "tools": Field("tools", required=False),
    },
    Format.completion: {
        "code": Field("code"),
        "description": Field("description", required=False),
    },
    Format.bfcl: {"question": Field("question"), "function": Field("function")},
    Format.trajectory: {"trajectory": Field("trajectory")},
    Format.flagged: {"conversation": Field("conversation")},
}


def check_columns(row: Row, source: Source, name: str) -> None:
    """Refuses a configuration that does not fit the columns of `row`, the first of `source`.

    Raises:
        ValueError: a field or placeholder is unknown, or its column is not there; the message names
            the key and the columns that are there.
    """
    fields = FIELDS[source.format]
    key = f"data.sources.{name}"
    there = f"; {source.path} has {', '.join(map(str, row))}"
    for field in source.columns:
        if field not in fields:
            known = ", ".join(fields)
            raise ValueError(f"{key}.columns.{field} must be one of {known} ({source.format.name})")
    for field, (default, required) in fields.items():
        column = source.columns.get(field, default)
        if required and column not in row:
            raise ValueError(f"{key}.columns.{field} must name a column, got {column}{there}")
    if source.format in (Format.prompt, Format.completion):
        derived = ["prompt"] if source.format is Format.completion else []
        columns = PLACEHOLDER.findall(source.instruction)
        if not columns:
            raise ValueError(f"{key}.instruction must hold a {{column}}{there}")
        for column in columns:
            if column not in row and column not in derived:
                raise ValueError(f"{key}.instruction must name columns, got {{{column}}}{there}")


def conversation(row: Row, source: Source, name: str) -> Conversation:
    """`row` as a conversation of the source that the configuration calls `name`.

    Raises:
        FormatError: it is none.
    """
    fields = FIELDS[source.format]
    values = {f: row.get(source.columns.get(f, default)) for f, (default, _) in fields.items()}
    for field, (_, required) in fields.items():
        if required and values[field] is None:
            raise FormatError(f"no {source.columns.get(field, field)}")
    messages, tools = _parse(values, row, source)
    if not any(m.role == "user" for m in messages):
        raise FormatError("no user message")
    follow_ups = _follow_ups(values, row, source)
    return Conversation(
        messages=tuple(messages),
        tools=tuple(tools),
        id=conversation_id(messages, tools, follow_ups),
        source=name,
        licence=source.licence,
        follow_ups=follow_ups,
    )


def _parse(values: Row, row: Row, source: Source) -> tuple[list[Message], list[dict[str, Any]]]:
    match source.format:
        case Format.messages:
            return _turns(values["messages"]), _schemas(values["tools"])
        case Format.sharegpt:
            system = [Message("system", values["system"])] if values["system"] else []
            turns = _turns(values["conversations"], role_key="from", content_key="value")
            return [*system, *turns], _schemas(values["tools"])
        case Format.alpaca:
            parts = (_text(values["instruction"]), _text(values["input"]))
            asked = "\n\n".join(part for part in parts if part)
            return _question(asked, values["output"]), []
        case Format.openai_log:
            return _exchange(values)
        case Format.prompt:
            asked = _fill(source.instruction, row)
            return _question(asked, values["answer"]), _schemas(values["tools"])
        case Format.completion:
            header, answer = _cut_function(values["code"], values["description"])
            return _question(_fill(source.instruction, {**row, "prompt": header}), answer), []
        case Format.bfcl:
            return _turns(_first_turns(values["question"])), _schemas(values["function"])
        case Format.trajectory:
            return _turns(values["trajectory"], content_key="text"), []
        case Format.flagged:
            return _turns(values["conversation"]), []


def _follow_ups(values: Row, row: Row, source: Source) -> tuple[tuple[Message, ...], ...]:
    """The turns after the first, of the formats that have them without answers."""
    match source.format:
        case Format.bfcl:
            turns = _decoded(values["question"], list)
            later = turns[1:] if turns and isinstance(turns[0], list) else []
            return tuple(tuple(_turns(turn)) for turn in later if turn)
        case Format.prompt:
            for column in PLACEHOLDER.findall(source.instruction):
                if isinstance(row.get(column), list):
                    return tuple((Message("user", _said(t, column)),) for t in row[column][1:])
    return ()


def _question(asked: str, answer: str | None) -> list[Message]:
    return [Message("user", asked), *([Message("assistant", _text(answer))] if answer else [])]


def _exchange(values: Row) -> tuple[list[Message], list[dict[str, Any]]]:
    """A logged request, and the first choice of its response when there is one."""
    request = _decoded(values["request"], dict)
    response = _decoded(values["response"], dict) if values["response"] else None
    if "messages" not in request:
        raise FormatError(f"the request has no messages, but {', '.join(request)}")
    messages = _turns(request["messages"], keep_empty_system=True)
    if response is not None:
        body = response.get("body") or response  # a line of a batch's output has a body
        choices = body.get("choices")
        if not choices:
            raise FormatError("the response has no choices")
        messages += _turns([choices[0].get("message")])
    return messages, _schemas(request.get("tools"))


def _turns(
    turns: Any,
    *,
    role_key: str = "role",
    content_key: str = "content",
    keep_empty_system: bool = False,
) -> list[Message]:
    """Messages from a list of turns, perhaps encoded as JSON.

    An empty system turn is how data sets say that there is none; in a request it is meant.
    """
    messages = []
    for i, turn in enumerate(_decoded(turns, list)):
        if not isinstance(turn, dict) or role_key not in turn:
            keys = ", ".join(turn) if isinstance(turn, dict) else type(turn).__name__
            raise FormatError(f"turn {i} has no {role_key}, but {keys}")
        try:
            message = _message(turn, str(turn[role_key]), turn.get(content_key))
        except FormatError as error:
            raise FormatError(f"turn {i}: {error}") from error
        if message.role != "system" or message.content.strip() or keep_empty_system:
            messages.append(message)
    return messages


def _message(turn: Row, role: str, content: Any) -> Message:
    if role in CALL_ROLES:
        return Message("assistant", "", tool_calls=(_tool_call(_decoded(content, dict)),))
    role = ROLE_ALIASES.get(role, role)
    if role not in ROLES:
        raise FormatError(f"unknown role {role}")
    if role == "system" and content is None:
        content = turn.get("system_prompt")  # of SWE-agent's trajectories
    calls = list(_decoded(turn.get("tool_calls") or [], list))
    if turn.get("function_call"):
        calls.append(_decoded(turn["function_call"], dict))
    return Message(
        role=role,
        content=_text(content),
        tool_calls=tuple(_tool_call(call) for call in calls),
        tool_call_id=turn.get("tool_call_id"),
        reasoning=next((_text(turn[k]) for k in REASONING_KEYS if turn.get(k)), None),
        learn=bool(turn.get("loss", True)),
    )


def _tool_call(call: Any) -> ToolCall:
    """OpenAI's form, or its function alone; arguments are an object or its JSON."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FormatError("a tool call without a name")
    arguments = function.get("arguments") or {}
    return ToolCall(call.get("id"), function["name"], dict(_decoded(arguments, dict)))


def _text(content: Any) -> str:
    """What a content says; parts are joined by line ends, as vLLM joins them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FormatError(f"content is a {type(content).__name__}")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise FormatError(f"content has a part that is not text: {str(part)[:40]}")
        parts.append(text)
    return "\n".join(parts)


def _first_turns(question: Any) -> Any:
    """The first turn of BFCL's list of turns, each a list of messages."""
    turns = _decoded(question, list)
    return turns[0] if turns and isinstance(turns[0], list) else turns


def _schemas(tools: Any) -> list[dict[str, Any]]:
    """Tools in OpenAI's form, untouched, or bare functions, whose parameters may be bare too."""
    return [_schema(tool) for tool in _decoded(tools or [], list)]


def _schema(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not ("function" in tool or "name" in tool):
        raise FormatError("a tool without a name")
    if "function" in tool:
        return tool
    parameters = _json_types(tool.get("parameters") or {})
    if not isinstance(parameters.get("type"), str):
        parameters = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {**tool, "parameters": parameters}}


# Python's names for types, as in BFCL's schemas.
JSON_TYPES = {
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "float": "number",
    "int": "integer",
    "bool": "boolean",
    "str": "string",
    "any": "string",
}


def _json_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_json_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = {key: _json_types(value) for key, value in schema.items()}
    if isinstance(named.get("type"), str):
        named["type"] = JSON_TYPES.get(named["type"], named["type"])
    return named


def _fill(instruction: str, row: Row) -> str:
    """`instruction` with the text of columns; of a column of turns, the first."""

    def text(match: re.Match[str]) -> str:
        value = row.get(match[1])
        return _said(value[0] if isinstance(value, list) and value else value, match[1])

    return PLACEHOLDER.sub(text, instruction)


def _said(value: Any, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise FormatError(f"{column} holds no text")
    return value


def _cut_function(code: Any, description: Any) -> tuple[str, str]:
    """(imports, signature and docstring; the whole in a fence) of a function to be completed.

    It is the first function with a docstring. Without one it is the last function, which in such
    code is the main one, and its docstring is `description`.
    """
    code = _text(code)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the code's own, such as unknown escapes
            module = ast.parse(code)
    except SyntaxError as error:
        raise FormatError(f"not Python: {error}") from error
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    documented = [f for f in functions if ast.get_docstring(f)]
    if not documented and not (functions and description):
        raise FormatError("no function with a docstring, and no description")
    function = documented[0] if documented else functions[-1]
    docstring = ast.get_docstring(function) or inspect.cleandoc(_text(description))
    source = ast.get_source_segment(code, function)
    imports = [ast.unparse(n) for n in module.body if isinstance(n, ast.Import | ast.ImportFrom)]
    function.body = [ast.Expr(ast.Constant(textwrap.indent(docstring, "    ").strip()))]
    before = "\n".join(imports) + "\n\n\n" if imports else ""
    return f"{before}{ast.unparse(function)}\n", f"```python\n{before}{source}\n```"


def _decoded(value: Any, kind: type) -> Any:
    """`value`, which is of `kind`, or JSON of it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise FormatError(f"not JSON: {error}") from error
    if not isinstance(value, kind):
        raise FormatError(f"a {kind.__name__} was expected, got a {type(value).__name__}")
    return value
