"""Greedy decoding as a few lines over transformers do it: a peer."""

from collections.abc import Callable
from time import perf_counter

import torch

from specfit.latency.speeds import Answer, Prompt
from specfit.targets.target import Target


def transformers_loop(
    target: Target, max_new_tokens: int
) -> Callable[[], Callable[[Prompt], Answer]]:
    """Opens it: the model, its own growing cache, and argmax."""

    @torch.inference_mode()
    def answer(prompt: Prompt) -> Answer:
        from transformers import DynamicCache

        cache = DynamicCache(config=target.model.config)
        ids = torch.tensor([prompt.tokens])
        tokens: list[int] = []
        began = perf_counter()
        while len(tokens) < max_new_tokens and not set(tokens[-1:]) & set(target.info.eos_ids):
            output = target.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
            ids = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
            if len(tokens) == 1:
                began = perf_counter()  # the prompt does not count
        return Answer(tokens, perf_counter() - began)

    return lambda: answer
