"""What a selection works on: a target whose units can be switched, texts, and what was measured."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from specfit.files import append_jsonl, read_jsonl
from specfit.quantization.activations import input_scales
from specfit.quantization.config import Granularity, Precision, QuantizeConfig
from specfit.quantization.divergence import ModelDivergence
from specfit.quantization.measured import Text
from specfit.quantization.switch import UnitSwitch
from specfit.quantization.texts import Answered, TextSettings, passages
from specfit.quantization.units import Unit
from specfit.targets.target import Target
from specfit.traffic.config import ProfileConfig


def text_settings(config: QuantizeConfig, profile: ProfileConfig, seed: int) -> TextSettings:
    """How much text, and of what."""
    return TextSettings(
        weights={c.name: c.weight for c in profile.components},
        temperatures={c.name: c.temperature for c in profile.components},
        num_passages=config.num_passages,
        num_unit_passages=config.num_unit_passages,
        num_context=config.context_tokens,
        num_counted=config.counted_tokens,
        seed=seed,
    )


def divergence_of(
    target: Target,
    config: QuantizeConfig,
    settings: TextSettings,
    texts: Mapping[Text, Sequence[Answered]],
    *,
    units: Collection[Unit],
    rest: Precision | None,
    amax: Mapping[str, float] | None,
) -> ModelDivergence:
    """The target's own, on some texts.

    Args:
        target: as it came.
        config: what is asked for.
        settings: of the texts.
        texts: which to measure on.
        units: that may be chosen.
        rest: the format of those that are not.
        amax: of its inputs, for W4A4.
    """
    switch = UnitSwitch(
        target, rule=config.rule, rest=rest, units=units, input_scales=input_scales(amax)
    )
    return ModelDivergence(
        target,
        switch,
        {text: passages(answered, settings) for text, answered in texts.items()},
        groups=_groups(switch.units, config.granularity),
        batch_size=config.batch_size,
    )


def _groups(units: Sequence[Unit], granularity: Granularity) -> list[list[Unit]]:
    if granularity is Granularity.fused:
        return [[unit] for unit in units]
    layers = sorted({unit.layer for unit in units})
    return [[unit for unit in units if unit.layer == layer] for layer in layers]


class JsonlJournal:
    """What was measured, a line each; see `Journal`."""

    def __init__(self, path: Path, known: Mapping[str, list[float]] | None = None) -> None:
        """Keeps what is new in `path`; `known` was measured by others."""
        self.path = path
        self._known: dict[str, list[float]] = dict(known or {})
        if path.exists():
            self._known |= dict(read_jsonl(path, tolerate_truncated_tail=True))

    def get(self, key: str) -> list[float] | None:
        """See `Journal.get`."""
        return self._known.get(key)

    def put(self, key: str, values: list[float]) -> None:
        """See `Journal.put`."""
        self._known[key] = values
        append_jsonl(self.path, [(key, values)])
