"""The structures of templates that are in use, with tokenizers that know their special tokens."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specfit_data.conversations import Conversation, Message, ToolCall, conversation_id
from specfit_data.render import Renderer

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = {
    "chatml": "<|im_start|> <|im_end|> <|x|>",
    "chatml_generation": "<|im_start|> <|im_end|>",
    "llama31": "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
    "<|python_tag|>",
    "qwen3": "<|im_start|> <|im_end|>",
    "mistral": "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] "
    "[TOOL_RESULTS] [/TOOL_RESULTS]",
    "gemma": "<bos> <start_of_turn> <end_of_turn>",
    "r1": "<s> </s> <|User|> <|Assistant|> <|call|> <|sep|> <|/call|> <|result|> <|/result|>",
    "phi3": "<|user|> <|assistant|> <|end|> <|endoftext|>",
    "harmony": "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>",
}
BOS_EOS = {
    "llama31": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<end_of_turn>"),
    "r1": ("<s>", "</s>"),
    "phi3": (None, "<|endoftext|>"),
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@cache
def tokenizer_of(
    name: str, *, trim_offsets: bool = True, template: str | None = None
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the answer is sunny, the user asks"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL[name].split()])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    bos, eos = BOS_EOS.get(name, (None, "<|im_end|>" if "<|im_end|>" in SPECIAL[name] else None))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    fast.chat_template = template or (TEMPLATES / f"{name}.jinja").read_text()
    return fast


def renderer(name: str, **options: object) -> Renderer:
    return Renderer(tokenizer_of(name, **options))


def talk(*messages: Message, tools: tuple[dict, ...] = (), **fields: object) -> Conversation:
    id_ = conversation_id(messages, tools)
    return Conversation(messages, tools, id_, "test", "MIT", **fields)


def user(content: str) -> Message:
    return Message("user", content)


def says(content: str, reasoning: str | None = None, *, learn: bool = True) -> Message:
    return Message("assistant", content, reasoning=reasoning, learn=learn)


def calls(*cities: str, content: str = "", reasoning: str | None = None) -> Message:
    made = tuple(ToolCall(f"call{i:05}", "weather", {"city": c}) for i, c in enumerate(cities))
    return Message("assistant", content, tool_calls=made, reasoning=reasoning)


def result(content: str, call: int = 0) -> Message:
    return Message("tool", content, tool_call_id=f"call{call:05}")
