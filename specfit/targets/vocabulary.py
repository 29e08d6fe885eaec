"""What a target's tokens are, as text."""

from specfit.targets.target import Target
from specfit_serve.repetition import TokenClass, classify_tokens


def token_classes(target: Target) -> tuple[TokenClass, ...]:
    """What each token of the vocabulary is made of, for the repetition guard."""
    tokenizer = target.tokenizer
    texts = [tokenizer.decode([i]) for i in range(min(len(tokenizer), target.info.vocab_size))]
    texts += [""] * (target.info.vocab_size - len(texts))
    return classify_tokens(texts, set(tokenizer.all_special_ids))
