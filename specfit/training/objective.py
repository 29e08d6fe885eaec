"""What a head is trained on: the loss of a pack's chains, and the figures read beside it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specfit.draft_vocab import DraftVocab
from specfit.speculators.batches import TrainBatch, chain_counts, chain_starts
from specfit.speculators.eagle3 import Eagle3
from specfit.speculators.losses import draft_loss
from specfit.speculators.unroll import unroll
from specfit.targets.target import Target


@dataclass(frozen=True)
class PackFigures:
    """Sums over the chains of a pack, so that packs and processes can be added."""

    loss: Float[Tensor, ""]  # weighted by drafting step; carries the gradient
    weight: Float[Tensor, ""]  # what the loss is divided by
    counted: Int[Tensor, "steps"]  # chains that reach each step
    correct: Int[Tensor, "steps"]  # of them, those that draft the target's most likely token
    kept: Int[Tensor, "steps"]  # of them, those that are right up to this step


class DraftObjective(nn.Module):
    """A head and what its loss needs of the target: embeddings, norm and rows of the head."""

    def __init__(
        self,
        head: Eagle3,
        target: Target,
        vocab: DraftVocab,
        *,
        num_steps: int,
        step_decay: float,
        loss: dict[str, float],
    ) -> None:
        super().__init__()
        self.head = head
        self.num_steps = num_steps
        self.loss = loss
        device = target.device
        # Not parameters, and not in the head's state: hidden from nn.Module in a tuple.
        self._target = (target,)
        self.embeddings = target.embeddings.weight.detach()
        self.target_ids = vocab.target_ids.to(device)
        self.draft_ids = vocab.draft_ids.to(device)
        self.rows = target.head_weight[self.target_ids]
        self.step_weights = step_decay ** torch.arange(num_steps, device=device)

    def forward(self, batch: TrainBatch) -> PackFigures:
        """The figures of one pack."""
        starts = chain_starts(batch)
        counts = chain_counts(batch, starts, self.num_steps)
        log_probs, place_of = self._target_log_probs(batch, starts, counts)
        loss = torch.zeros((), device=batch.tokens.device)
        correct, kept = [], []
        right = torch.ones_like(starts, dtype=torch.bool)
        steps = unroll(
            self.head,
            batch,
            starts,
            num_steps=self.num_steps,
            embeddings=self.embeddings,
            target_ids=self.target_ids,
            teacher_forced=True,
        )
        for s, step in enumerate(steps):
            counted = counts[s]
            # The target's opinion of x_{t+s+2} is its output after x_{t+s+1}.
            after = (starts + s + 1)[counted]
            top = batch.top_token[after]
            values = draft_loss(
                self.loss, step.logits[counted], log_probs[place_of[after]], self.draft_ids[top]
            )
            loss = loss + self.step_weights[s] * values.sum()
            hit = torch.zeros_like(right)
            hit[counted] = step.tokens[counted] == top
            right = right & hit
            correct.append(hit.sum())
            kept.append(right.sum())
        counted_sums = counts.sum(1)
        weight = (self.step_weights * counted_sums).sum()
        return PackFigures(loss, weight, counted_sums, torch.stack(correct), torch.stack(kept))

    @torch.no_grad()
    def _target_log_probs(
        self, batch: TrainBatch, starts: Int[Tensor, "chains"], counts: Tensor
    ) -> tuple[Float[Tensor, "places draft"], Int[Tensor, "seq"]]:
        """Log p over the draft vocabulary, once for each place that a step asks for."""
        asked = torch.zeros(len(batch.tokens), dtype=torch.bool, device=batch.tokens.device)
        for s in range(self.num_steps):
            asked[(starts + s + 1)[counts[s]]] = True
        places = asked.nonzero().flatten()
        place_of = torch.full((len(batch.tokens),), -1, device=batch.tokens.device)
        place_of[places] = torch.arange(len(places), device=batch.tokens.device)
        logits = self._target[0].logits(batch.last[places], self.rows)
        return logits - batch.log_normalizer[places, None], place_of
