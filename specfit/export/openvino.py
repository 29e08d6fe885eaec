"""OpenVINO GenAI: the portable head, and the script that makes OpenVINO's files of it.

GenAI reads a graph that the library optimum-intel traces, which is no dependency of ours: what is
written here is vLLM's layout and `convert.py`, which runs where that library is. In the graph, aux
layers are counted by their output, and lie in `hidden_layers_list`; optimum-intel's class knows
none of the norm flags.
"""

from pathlib import Path

from specfit.draft_vocab import DraftVocab
from specfit.export import flat, vllm
from specfit.export.served import Served, needs, serve_text
from specfit.export.twins import Twin
from specfit.files import write_text
from specfit.speculators.eagle3 import Eagle3, Eagle3Config

NAME = "openvino"
NUM_AUX = 3
SCRIPT = "convert.py"
_SCRIPT_TEXT = '''\
"""Makes OpenVINO's files of the head in this folder: python convert.py OUT

It needs optimum-intel 2.2 and nncf, and torchvision must not be installed.
"""

import json
import sys
from pathlib import Path

import torch
from optimum.exporters.openvino import export_from_model
from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM
from transformers import AutoConfig

here, out = Path(__file__).resolve().parent, Path(sys.argv[1])
model, loading = LlamaEagle3ForCausalLM.from_pretrained(
    here,
    config=AutoConfig.from_pretrained(here),
    dtype=torch.float32,
    output_loading_info=True,
)
missing = [name for name in loading["missing_keys"] if "embed_tokens" not in name]
if missing:
    raise SystemExit(f"the head lacks {missing}")
# The exporter asks for an architecture that transformers has.
LlamaEagle3ForCausalLM.__module__ = "transformers.models.llama.eagle3"
export_from_model(
    model.eval(),
    out,
    task="text-generation-with-past",
    stateful=True,
    device="cpu",
    preprocessors=None,
)
# Inputs of layers in the head's config, outputs in the graph.
ids = json.loads((here / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
graph, mark = out / "openvino_model.xml", '<eagle3_mode value="True" />'
text = graph.read_text()
if mark not in text:
    raise SystemExit(f"{graph} has no {mark}")
listed = " ".join(str(i - 1) for i in ids)
graph.write_text(text.replace(mark, f'{mark}<hidden_layers_list value="{listed}" />'))
'''


def refusal(config: Eagle3Config, _served: Served) -> str | None:
    """See `Translator.refusal`."""
    layers = list(config.aux_layers)
    if len(layers) != NUM_AUX or layers[0] == 0:
        return f"speculator.aux_layers must be three from 1 on for {NAME}, got {layers}"
    return needs({flag: getattr(config, flag) for flag in flat.FLAGS}, NAME)


def write(folder: Path, head: Eagle3, vocab: DraftVocab, served: Served) -> None:
    """See `Translator.write`."""
    vllm.write(folder, head, vocab, served)
    write_text(folder / SCRIPT, _SCRIPT_TEXT)


def twin(folder: Path, served: Served) -> Twin:
    """See `Translator.twin`: of the graph that the script makes."""
    config = flat.read_config(folder)
    # Without a list GenAI takes the default ids for outputs, too.
    outputs = [i - 1 for i in config[flat.IDS]] if flat.IDS in config else None
    outputs = vllm.default_layers(served.info) if outputs is None else outputs
    return flat.twin(folder, config, aux_layers=[i + 1 for i in outputs], flags={})


def serving(_served: Served, num_draft_tokens: int) -> str:
    """See `Translator.serving`."""
    return serve_text(
        "python convert.py OUT  # then openvino_genai.LLMPipeline(TARGET, 'CPU', draft_model="
        f"openvino_genai.draft_model(OUT, 'CPU')), num_assistant_tokens={num_draft_tokens}",
        "Tried with openvino-genai 2026.4.1.0 and optimum-intel 2.2.0; greedy decoding only.",
        "TARGET is the target as `optimum-cli export openvino` makes it, OUT a folder of yours.",
    )
