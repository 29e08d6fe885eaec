"""The engines that heads are exported for, in the order in which they are shown."""

from specfit.export import llama_cpp, openvino, sglang, speculators, tensorrt_llm, vllm
from specfit.export.config import EngineName
from specfit.export.served import Translator

ENGINES: dict[EngineName, Translator] = {
    EngineName.vllm: vllm,
    EngineName.speculators: speculators,
    EngineName.sglang: sglang,
    EngineName.tensorrt_llm: tensorrt_llm,
    EngineName.llama_cpp: llama_cpp,
    EngineName.openvino: openvino,
}
