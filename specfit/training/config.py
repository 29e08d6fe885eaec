"""The configuration of `train`."""

from dataclasses import dataclass, field

from specfit.checks import require, require_positive


@dataclass
class TrainConfig:
    """How one speculator is trained."""

    ttt_steps: int = 4  # drafting steps unrolled in training (EAGLE-3's training-time test)
    step_decay: float = 0.8  # weight of step s in the loss: step_decay ** s
    # A sum of kl, tv, lk and ce, each with an optional factor: `lk`, `0.5*kl+0.5*tv`.
    loss: str = "kl"
    # Keep the target's own rows: rare tokens stay as good as they are there, and a third of the
    # head's products is saved. Worth training with much more data than tokens in the vocabulary.
    freeze_lm_head: bool = True
    epochs: int = 8  # 0 with speculator.from_checkpoint: none
    pack_tokens: int = 2048  # tokens a pack: documents side by side that do not see each other
    packs_per_step: int = 1  # packs an optimizer step, over all processes
    lr: float = 1e-3
    min_lr_share: float = 0.02  # the cosine ends at this share of lr
    warmup_share: float = 0.05  # of all optimizer steps
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0
    evals: int = 8  # measurements of acceptance on validation conversations, evenly spaced
    eval_draft_tokens: int = 4  # tokens drafted a round in those measurements
    save_every_s: float = 60.0  # seconds between checkpoints to resume from

    def __post_init__(self) -> None:
        counts = ("ttt_steps", "pack_tokens", "packs_per_step", "evals")
        require_positive(self, "train", *counts, "eval_draft_tokens")
        for name in ("lr", "max_grad_norm", "step_decay"):
            require(getattr(self, name) > 0, f"train.{name}", "be positive", getattr(self, name))
        require(self.epochs >= 0, "train.epochs", "be at least 0", self.epochs)
        require(self.weight_decay >= 0, "train.weight_decay", "be at least 0", self.weight_decay)
        pair = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(pair, "train.betas", "be two numbers in [0, 1)", self.betas)
        for name in ("min_lr_share", "warmup_share"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"train.{name}", "lie in [0, 1]", value)
