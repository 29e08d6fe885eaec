"""Tiny targets in memory, documents as they read them, and heads for them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import tiny_targets
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specfit.config import SpeculatorConfig, StateDtype
from specfit.draft_vocab import DraftVocab
from specfit.speculators.eagle3 import Eagle3, RMSNorm
from specfit.speculators.initialize import head_config, initialize
from specfit.speculators.proposer import Eagle3Proposer
from specfit.states.compute import compute
from specfit.states.documents import Document
from specfit.targets.info import read_info
from specfit.targets.slots import SlotTarget
from specfit.targets.target import HiddenStates, Target
from specfit.training.objective import DraftObjective
from specfit_serve.decode import Decoded, DecodeSettings, Request, decode
from specfit_serve.ngram import NoProposer

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def make_target(architecture: str = "llama", seed: int = 0) -> Target:
    """A frozen random target of one of `tiny_targets.CONFIGS`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_targets.CONFIGS[architecture]).eval()
    model.requires_grad_(False)
    tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=1)
    return Target(
        model, tokenizer, read_info(model, name="tiny", tokenizer=tokenizer, quantization=None)
    )


@dataclass(frozen=True)
class Speculator:
    """A head with what it needs of its target."""

    target: Target
    head: Eagle3
    vocab: DraftVocab

    @property
    def embeddings(self) -> Tensor:
        """The target's."""
        return self.target.embeddings.weight.detach()

    @property
    def drafting(self) -> dict[str, Tensor]:
        """What `unroll` and `replay` ask for beside the head."""
        return {"embeddings": self.embeddings, "target_ids": self.vocab.target_ids}

    def objective(self, **changes: Any) -> DraftObjective:
        """KL over three drafting steps, unless changed."""
        settings = {"num_steps": 3, "step_decay": 0.8, "loss": {"kl": 1.0}} | changes
        return DraftObjective(self.head, self.target, self.vocab, **settings)

    def document(
        self, tokens: list[int], spans: list[tuple[int, int]], component: str = "code"
    ) -> HiddenStates:
        """`tokens` as the target reads them; the assistant speaks in `spans`."""
        document = Document("d", component, "s", "train", tokens, spans)
        aux_layers = list(self.head.config.aux_layers)
        ((states, _),) = compute(self.target, [document], aux_layers, StateDtype.fp32)
        # Tensors made under inference mode cannot be saved for the gradient.
        return replace(states, **{name: t.clone() for name, t in vars(states).items()})


def make_speculator(target: Target, draft_vocab_size: int = 200, **config: Any) -> Speculator:
    """A head started from `target`, that also reads embeddings and whose norms are not ones."""
    settings = SpeculatorConfig(draft_vocab_size=draft_vocab_size, **config)
    generator = torch.Generator().manual_seed(7)
    counts = torch.rand(target.info.vocab_size, generator=generator)
    vocab = DraftVocab.from_counts(counts, draft_vocab_size, target.info.eos_ids)
    head = Eagle3(head_config(settings, target.info))
    initialize(head, target, vocab, settings.init, seed=3)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, RMSNorm):
                noise = torch.rand(module.weight.shape, generator=generator)
                module.weight.copy_(0.5 + noise)
        for name in ("q_proj", "k_proj", "v_proj"):
            of_embeddings = getattr(head.layer.self_attn, name).weight[:, : target.info.hidden_size]
            of_embeddings.normal_(0, 0.3, generator=generator)
    return Speculator(target, head.eval(), vocab)


def random_tokens(length: int, seed: int) -> list[int]:
    """Tokens of the vocabulary, none of which ends an answer."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, tiny_targets.VOCAB_SIZE, (length,), generator=generator)
    return list(tokens.tolist())


def greedy_requests(num: int) -> list[Request]:
    """Prompts of differing lengths."""
    return [Request(f"r{i}", random_tokens(4 + 3 * i, seed=i), 0.0) for i in range(num)]


def answer(
    speculator: Speculator,
    requests: list[Request],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    wrap: Any = lambda proposer: proposer,
) -> dict[str, Decoded]:
    """Decodes with the head, or alone with `num_draft_tokens` 0."""
    slots = {"num_slots": batch_size, "max_length": 96}
    target = SlotTarget(
        speculator.target, **slots, aux_layers=list(speculator.head.config.aux_layers)
    )
    if num_draft_tokens:
        proposer = wrap(
            Eagle3Proposer(speculator.head, speculator.vocab, speculator.embeddings, **slots)
        )
    else:
        proposer = NoProposer()
    settings = DecodeSettings(num_draft_tokens, max_new_tokens, batch_size)
    return {a.id: a for a in decode(target, proposer, requests, settings)}


def overfit(speculator: Speculator, documents: list[HiddenStates], num_steps: int) -> list[float]:
    """Trains the head in place on `documents`; the mean loss at each step."""
    from specfit.speculators.batches import pack

    objective = speculator.objective()
    batch = pack(documents)
    optimizer = torch.optim.Adam(speculator.head.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        figures = objective(batch)
        loss = figures.loss / figures.weight
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
