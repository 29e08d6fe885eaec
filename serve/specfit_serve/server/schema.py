"""What a request may ask for. What cannot be honoured is refused by name, never dropped."""

import json
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from specfit_serve.server.errors import ApiError, wrong

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20  # OpenAI's
MIN_TEMPERATURE = 0.01  # below it, other than 0, logits overflow float32
MAX_TEMPERATURE = 2.0  # OpenAI's

# Known fields that the decode loop has nothing for, with the values that ask for nothing. null asks
# for nothing in every field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none",),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),  # no tool is ever called: calls come as text
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# Fields that say who asks, not what.
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")

Asked = TypeVar("Asked", bound="CommonRequest")


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _text_of(value: object) -> object:
    """Content that comes in parts becomes one text, a line each, as vLLM has it."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise PydanticCustomError("content", "Input should be a text or parts of type text")
        if part.get("type") != "text" or set(part) != {"type", "text"}:
            raise PydanticCustomError("content", "Input should be a text or parts of type text")
    return "\n".join(part["text"] for part in value)


def _prompts(value: object) -> object:
    """A text, token ids, or a list of either: always the last."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    return value


class _Model(BaseModel):
    # Strict: a number in quotes is no number.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Model):
    """Of `stream_options`."""

    include_usage: bool = False


class FunctionCall(_Model):
    """What was called."""

    name: str
    arguments: str  # a JSON object


class ToolCall(_Model):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Model):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class CommonRequest(_Model):
    """What both ways of asking have."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(_stops),
        Field(max_length=MAX_STOPS),
    ] = []
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        """Asked for; None: as many as there may be."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Of likeliest tokens, beside those emitted; None: no logprobs."""
        raise NotImplementedError


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] = []

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CommonRequest):
    """The body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts), Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16  # OpenAI's
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def parse(kind: type[Asked], body: bytes) -> Asked:
    """The request that `body` is.

    Raises:
        ApiError: it is none, or asks for what there is not; `param` names the field.
    """
    fields = _fields(body)
    for name in LABELS:
        fields.pop(name, None)
    for name, neutral in NEUTRAL.items():
        value = fields.pop(name, None)
        if value is not None and not any(_is(value, v) for v in neutral):
            allowed = " or ".join([*map(json.dumps, neutral), "absent"])
            raise wrong(name, f"be {allowed}, since the decode loop has nothing for it", value)
    try:
        asked = kind.model_validate(fields)
    except ValidationError as error:
        raise _first(error) from error
    if asked.temperature and not MIN_TEMPERATURE <= asked.temperature <= MAX_TEMPERATURE:
        between = f"be 0 or lie in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]"
        raise wrong("temperature", between, asked.temperature)
    if asked.stream_options is not None and not asked.stream:
        raise wrong("stream_options", "be absent without stream", fields["stream_options"])
    if isinstance(asked, ChatRequest):
        _check_chat(asked)
    return asked


def _check_chat(asked: ChatRequest) -> None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise wrong("top_logprobs", "be absent without logprobs", asked.top_logprobs)
    both = (asked.max_tokens, asked.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise wrong("max_tokens", f"be max_completion_tokens ({both[1]}) or absent", both[0])


def _fields(body: bytes) -> dict[str, Any]:
    """Those of a JSON object that are not null."""
    try:
        fields = json.loads(body, parse_constant=_no_constant)
        # A lone surrogate is a string to Python, and no text to a tokenizer.
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body must be JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _is(value: object, neutral: object) -> bool:
    # 0 == False and 1 == True, and neither is meant.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _first(error: ValidationError) -> ApiError:
    """The first of what is wrong, by the name of its field."""
    found = error.errors(include_url=False)[0]
    field = ""
    for part in found["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part not in ("str", "list[int]"):  # which member of a union it is, is no field
            field += f".{part}" if field else part
    match found["type"]:
        case "extra_forbidden":
            return ApiError(400, f"unknown field {field}", param=field, code="unknown_field")
        case "missing":
            return ApiError(400, f"{field} must be given", param=field)
    return wrong(field, found["msg"].removeprefix("Input should "), found["input"])
