"""The repetition guard: notices that an answer has fallen into a loop.

A looping answer inflates acceptance and teaches a speculator nothing. Two signs are looked for in
the emitted tokens: a run of one token, and a cycle of up to 64 tokens. Some tokens repeat for good
reasons (indentation, rules of dashes, arrays of zeros), so limits go by class; none is exempt,
since corrupted caches degenerate into digits.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from types import MappingProxyType


class TokenClass(Enum):
    """What a token's text is made of."""

    special = 1
    space = 2
    digit = 3
    punctuation = 4  # and rules
    other = 5


# Runs this long fire. At least the smallest run seen at most once per million tokens in public
# text (7.4M tokens of Python, 8.7M of C, 2.9M of JSON, 1.1M of prose; SmolLM2's tokenizer, which
# splits numbers into digits): other 5, space 16, digit 24, punctuation 24, and 48 in prose alone.
RUN_LIMITS: Mapping[TokenClass, int] = MappingProxyType(
    {
        TokenClass.special: 4,
        TokenClass.other: 8,
        TokenClass.space: 24,
        TokenClass.punctuation: 48,
        TokenClass.digit: 64,
    }
)
MAX_PERIOD = 64  # tokens of a cycle's longest copy
MIN_COPIES = 4
MIN_CYCLE_TOKENS = 48  # of all copies together
# Of cycles made of space, digits and punctuation alone: `0, 0, 0, 0` is how people write arrays.
MIN_PLAIN_CYCLE_TOKENS = 192
_PLAIN = frozenset({TokenClass.space, TokenClass.digit, TokenClass.punctuation})


def classify_tokens(
    texts: Sequence[str | bytes], special_ids: Collection[int]
) -> tuple[TokenClass, ...]:
    """The class of each token of a vocabulary, from its text; index is token id.

    Bytes that are no complete UTF-8, a part of a character, are `other`.
    """
    specials = frozenset(special_ids)
    return tuple(
        TokenClass.special if i in specials else _class_of(text) for i, text in enumerate(texts)
    )


def _class_of(text: str | bytes) -> TokenClass:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    text = text.strip()
    if not text:
        return TokenClass.space
    if text.isdigit():
        return TokenClass.digit
    if "\N{REPLACEMENT CHARACTER}" in text or any(c.isalnum() for c in text):
        return TokenClass.other
    return TokenClass.punctuation


class RepetitionGuard:
    """Watches one sequence of tokens; `token_classes` has one entry per token of the vocabulary."""

    def __init__(self, token_classes: Sequence[TokenClass]) -> None:
        self._classes = token_classes
        self._num_tokens = 0
        # [p - 1] in both: the token p back, and for how many tokens in a row, up to the newest,
        # each has equalled the one p before it. -1 stands for the time before the first token.
        self._recent = deque([-1] * MAX_PERIOD, maxlen=MAX_PERIOD)
        self._num_equal = [0] * MAX_PERIOD

    def push(self, token: int) -> int | None:
        """Takes in the next token; the index at which the loop starts, once there is one.

        The loop's first copy counts as part of it. Costs O(MAX_PERIOD).
        """
        self._num_equal = [
            n + 1 if earlier == token else 0
            for n, earlier in zip(self._num_equal, self._recent, strict=True)
        ]
        self._recent.appendleft(token)
        self._num_tokens += 1

        run = self._num_equal[0] + 1
        if run >= RUN_LIMITS[self._classes[token]]:
            return self._num_tokens - run
        for period in range(2, MAX_PERIOD + 1):
            # The first copy equals nothing before it: n equal tokens are a cycle of n + period.
            length = self._num_equal[period - 1] + period
            if length >= MIN_CYCLE_TOKENS and length >= MIN_COPIES * period:
                if length < MIN_PLAIN_CYCLE_TOKENS and self._is_plain(period):
                    continue
                return self._num_tokens - length
        return None

    def _is_plain(self, period: int) -> bool:
        return all(self._classes[self._recent[i]] in _PLAIN for i in range(period))
