"""What decodes: our kernels where they run the target, transformers elsewhere."""

import logging
from dataclasses import dataclass
from pathlib import Path

from specfit.config import Engine
from specfit.draft_vocab import DraftVocab
from specfit.speculators.eagle3 import Eagle3
from specfit.speculators.packed import eagle3_weights
from specfit.speculators.proposer import Eagle3Proposer
from specfit.targets.packed import llama_weights, stored_weights
from specfit.targets.packed_gpu import gpu_weights
from specfit.targets.slots import SlotTarget
from specfit.targets.target import Target
from specfit_kernels import cpu_build
from specfit_serve import eagle3
from specfit_serve.gpu_weights import GpuWeights
from specfit_serve.llama import LlamaTarget, LlamaWeights
from specfit_serve.protocols import DecodeTarget, Proposer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeEngine:
    """Makes the slots that a target is decoded in, and the heads that draft there."""

    target: Target
    # The target's, packed for a CPU or a GPU; None: transformers runs it.
    weights: LlamaWeights | GpuWeights | None = None
    heads_in_int8: bool = False  # on the CPU kernels

    @property
    def name(self) -> str:
        """As `runtime.engine` has it."""
        return (Engine.torch if self.weights is None else Engine.fp4).name

    def slots(
        self, *, num_slots: int, max_length: int, aux_layers: list[int] | None
    ) -> DecodeTarget:
        """Empty ones; the arguments are those of `SlotTarget`, `LlamaTarget` and `GpuTarget`."""
        if self.weights is None:
            return SlotTarget(
                self.target, num_slots=num_slots, max_length=max_length, aux_layers=aux_layers
            )
        if isinstance(self.weights, GpuWeights):
            from specfit_serve.gpu import GpuTarget  # imports Triton, which only Linux has

            return GpuTarget(
                self.weights, num_slots=num_slots, max_length=max_length, aux_layers=aux_layers
            )
        return LlamaTarget(
            self.weights, num_slots=num_slots, max_length=max_length, aux_layers=aux_layers
        )

    def eagle3(
        self, head: Eagle3, vocab: DraftVocab, *, num_slots: int, max_length: int
    ) -> Proposer:
        """A head over as many slots."""
        embeddings = self.target.embeddings.weight.detach()
        if not isinstance(self.weights, LlamaWeights) or head.config.hidden_act != "silu":
            return Eagle3Proposer(
                head, vocab, embeddings, num_slots=num_slots, max_length=max_length
            )
        weights = eagle3_weights(head, vocab, embeddings, in_int8=self.heads_in_int8)
        return eagle3.Eagle3Proposer(weights, num_slots=num_slots, max_length=max_length)


def decode_engine(name: Engine, target: Target, folder: Path) -> DecodeEngine:
    """The engine that `runtime.engine` asks for.

    Args:
        name: `auto` takes transformers where the kernels cannot run the target, and logs why.
        target: in memory.
        folder: of its checkpoint, whose quantized matrices the kernels read as they are.

    Raises:
        ValueError: the kernels are asked for and cannot run the target.
    """
    is_on_cpu = target.device.type == "cpu"
    # On a GPU `auto` stays with transformers until ours has been measured on one.
    if name is Engine.torch or (name is Engine.auto and not is_on_cpu):
        return DecodeEngine(target)
    if not is_on_cpu:
        return DecodeEngine(target, gpu_weights(target, stored_weights(folder)))
    try:
        if name is Engine.auto and cpu_build.paths() == [cpu_build.CpuPath.torch]:
            raise ValueError("the CPU kernels are not compiled")
        return DecodeEngine(target, llama_weights(target, stored_weights(folder)))
    except ValueError as error:
        if name is Engine.fp4:
            raise
        log.info("decode engine=torch reason=%s", error)
        return DecodeEngine(target)
