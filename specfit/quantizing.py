"""The two stages that quantize the target, where a budget asks for it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specfit.artifacts import Artifact
from specfit.config import RunConfig
from specfit.open_target import OpenTarget
from specfit.recipes import given_head
from specfit.stages import quantize, sensitivity


@dataclass(frozen=True)
class Quantizing:
    """Makes them for one configuration."""

    cfg: RunConfig
    opened: OpenTarget
    prompts: Callable[[], Artifact]
    make: Callable[[str, Callable[[Path], None]], Artifact]

    def sensitivity(self) -> Artifact:
        """Raises ValueError without a budget."""
        if self.cfg.quantize.budget is None:
            raise ValueError(
                f"quantize.budget must be set for stage={self.cfg.stage.name} (0.67: two thirds of "
                "the weights in NVFP4), got null"
            )
        conversations = self.prompts()
        return self.make(
            "sensitivity",
            lambda folder: sensitivity.run(
                sensitivity.SensitivityJob(
                    folder=folder,
                    config=self.cfg.quantize,
                    profile=self.cfg.profile,
                    seed=self.cfg.seed,
                    prompts=conversations,
                    source=self.opened.plain_folder,
                    target=self.opened.plain,
                    trust_remote_code=self.cfg.target.trust_remote_code,
                    engine=self.opened.plain_engine,
                )
            ),
        )

    def quantize(self, alone: Artifact) -> Artifact:
        """Raises GateRejected where `quantize.gate` is not passed; what was made is kept."""
        conversations = self.prompts()
        speculator = given_head(self.cfg)
        made = self.make(
            "quantize",
            lambda folder: quantize.run(
                quantize.QuantizeJob(
                    folder=folder,
                    config=self.cfg.quantize,
                    profile=self.cfg.profile,
                    seed=self.cfg.seed,
                    prompts=conversations,
                    sensitivity=alone,
                    speculator=speculator,
                    measure=self.cfg.measure,
                    source=self.opened.plain_folder,
                    target=self.opened.plain,
                    engine=self.cfg.runtime.engine,
                )
            ),
        )
        self.opened.close_plain()
        quantize.check_gate(made, self.cfg.quantize.gate)
        return made
