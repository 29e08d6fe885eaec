"""OpenVINO GenAI answers prompts greedily; runs in its own environment, for real_servers.py.

A JSON object comes on standard input, and one goes to standard output.
"""

import json
import sys
import time
from importlib.metadata import version

import numpy as np
import openvino as ov
import openvino_genai as genai

OPTIONS = {
    "INFERENCE_NUM_THREADS": 1,
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
}


def main() -> None:
    asked = json.load(sys.stdin)
    more = {}
    if asked["head"]:
        more["draft_model"] = genai.draft_model(asked["head"], "CPU", **OPTIONS)
    cache = genai.SchedulerConfig()
    cache.cache_size = 1
    pipeline = genai.LLMPipeline(asked["target"], "CPU", scheduler_config=cache, **OPTIONS, **more)
    config = genai.GenerationConfig()
    config.max_new_tokens = asked["num_tokens"]
    config.do_sample = False
    config.ignore_eos = True
    config.apply_chat_template = False
    if asked["head"]:
        config.num_assistant_tokens = asked["num_draft_tokens"]
    tokens, drafted, accepted, rounds = [], 0, 0, 0
    began = time.perf_counter()
    for prompt in asked["prompts"]:
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        found = pipeline.generate(genai.TokenizedInputs(ids, mask), config)
        tokens.append([int(token) for token in found.tokens[0]])
        figures = getattr(found, "extended_perf_metrics", None)
        if figures is not None:
            num_accepted = figures.get_num_accepted_tokens()
            accepted += num_accepted
            drafted += figures.get_num_draft_tokens()
            # What was not accepted is the first token, of the prompt, and one a round.
            rounds += len(tokens[-1]) - 1 - num_accepted
    answer = {
        "version": version("openvino-genai"),
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
        "num_rounds": rounds,
        "num_drafted": drafted,
        "num_accepted": accepted,
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
