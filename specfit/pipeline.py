"""The path, from a checkpoint to a report: each stage, and what it reads."""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import torch

from specfit.artifacts import Artifact, ArtifactStore, Recipe, StatusRow
from specfit.artifacts import status as store_status
from specfit.beside import Beside, described, is_described, predicted
from specfit.config import ExtractMode, RunConfig, SpeculatorConfig, Stage
from specfit.export.imports import adopted
from specfit.files import GIB, read_json
from specfit.matrix import measured_heads
from specfit.open_target import OpenTarget
from specfit.provenance import provenance
from specfit.quantizing import Quantizing
from specfit.recipes import measured_rows, more_heads, planned_mixture, recipes_of, unquantized
from specfit.speculators.initialize import aux_layers_of, head_config
from specfit.stages import (
    bench,
    export,
    extract,
    fit,
    generate,
    measure,
    predict,
    profile,
    prompts,
    report,
    serve,
    target,
    train,
)
from specfit.states.record import StateRecorder, recorder_in
from specfit.targets.info import read_info_file
from specfit.targets.load import device_of
from specfit.targets.locate import locate


def run(cfg: RunConfig) -> Artifact:
    """Makes what `cfg.stage` makes, and first whatever it reads that is not there yet.

    Raises:
        ValueError: the configuration and what it names do not fit together.
    """
    if cfg.runtime.num_threads:
        torch.set_num_threads(cfg.runtime.num_threads)
    if is_described(cfg):
        return predicted(cfg, _store_of(cfg))
    if cfg.stage is Stage.serve:
        return serve.run(cfg.serve, _Path(cfg))
    made: Artifact = getattr(_Path(cfg), cfg.stage.name)
    return made


def _store_of(cfg: RunConfig) -> ArtifactStore:
    return ArtifactStore(Path(cfg.runtime.root), int(cfg.runtime.min_free_gb * GIB))


def recipes(cfg: RunConfig) -> dict[str, Recipe]:
    """Of every stage, by name, in order; nothing is made."""
    if is_described(cfg):
        return {cfg.stage.name: described(cfg)}
    return _Path(cfg).recipes


def status(cfg: RunConfig) -> list[StatusRow]:
    """How every stage stands; nothing is made."""
    path = _Path(cfg, download=False)
    return store_status(path.store, path.recipes)


class _Path:
    """The stages of one configuration. Each is made when it is first asked for."""

    def __init__(self, cfg: RunConfig, *, download: bool = True) -> None:
        train.check(cfg.train, cfg.speculator, cfg.runtime.num_processes)
        self.cfg = cfg
        self.device = device_of(cfg.runtime.device)
        self.store = _store_of(cfg)
        digests = self.store.root / "digests.json"
        self.location = locate(cfg.target, digests=digests, download=download)
        self.recipes = recipes_of(cfg, self.location, digests)
        sources = {"target": lambda: self.target, "quantize": lambda: self.quantize}
        self.opened = OpenTarget(cfg, self.location, self.device, **sources)
        self.beside = Beside(cfg, self.store, self.recipes["target"].key, self._count_tokens)
        self.cfg = self.beside.observed()
        if self.cfg is not cfg:
            self.recipes = recipes_of(self.cfg, self.location, digests)
        self.quantizing = Quantizing(self.cfg, self.opened, lambda: self.prompts, self._make)
        self.weights = {c.name: c.weight for c in self.cfg.profile.components}

    def _count_tokens(self, text: str) -> int:
        return len(self.opened.plain.tokenizer(text).input_ids)

    def _make(self, stage: str, make: Callable[[Path], None]) -> Artifact:
        return self.store.get_or_make(self.recipes[stage], make)

    @cached_property
    def target(self) -> Artifact:
        return self._make(
            "target",
            partial(target.run, config=self.cfg.target, location=self.location, device=self.device),
        )

    @cached_property
    def prompts(self) -> Artifact:
        info = read_info_file(self.target.file("info.json"))
        head_config(adopted(self.cfg.speculator, info), info)  # fails here, not after the answers
        return self._make(
            "prompts",
            lambda folder: prompts.run(
                folder,
                data=self.cfg.data,
                profile=self.cfg.profile,
                mixture=planned_mixture(self.cfg),
                seed=self.cfg.seed,
                tokenizer=self.opened.plain.tokenizer,
            ),
        )

    @cached_property
    def profile(self) -> Artifact:
        conversations = self.prompts
        return self._make(
            "profile",
            lambda folder: profile.run(
                folder,
                profile=self.cfg.profile,
                seed=self.cfg.seed,
                prompts=conversations,
                logs=self.beside.log_record,
            ),
        )

    @cached_property
    def fingerprint(self) -> Artifact:
        return self.beside.fingerprint()

    @cached_property
    def drift(self) -> Artifact:
        return self.beside.drift(lambda: self.measure)

    @cached_property
    def sensitivity(self) -> Artifact:
        return self.quantizing.sensitivity()

    @cached_property
    def quantize(self) -> Artifact:
        return self.quantizing.quantize(self.sensitivity)

    @cached_property
    def generate(self) -> Artifact:
        # The target is made before this stage's lock is taken, not inside it.
        conversations, _ = self.prompts, self.opened.served

        def make(folder: Path) -> None:
            config = self.cfg.extract
            kept = config.mode is ExtractMode.store and config.while_generating
            asked_for = kept and self.cfg.stage.value >= Stage.extract.value
            recipe = self.recipes["extract"] if asked_for else None
            with recorder_in(self.store, recipe, self._recorder) as recorder:
                generate.run(
                    folder,
                    config=self.cfg.generate,
                    temperatures={c.name: c.temperature for c in self.cfg.profile.components},
                    seed=self.cfg.seed,
                    prompts=conversations,
                    engine=self.opened.engine,
                    recorder=recorder,
                )

        return self._make("generate", make)

    def _recorder(self, folder: Path) -> StateRecorder:
        layers, target = self._aux_layers, self.opened.loaded
        return StateRecorder(folder, config=self.cfg.extract, aux_layers=layers, target=target)

    @cached_property
    def _speculator(self) -> SpeculatorConfig:
        return adopted(self.cfg.speculator, self.opened.info)

    @property
    def _aux_layers(self) -> list[int]:
        return aux_layers_of(self._speculator, self.opened.info)

    @cached_property
    def fit(self) -> Artifact:
        conversations, answers = self.prompts, self.generate
        given = self.cfg.speculator.from_checkpoint
        return self._make(
            "fit",
            lambda folder: fit.run(
                fit.FitJob(
                    folder=folder,
                    config=self.cfg.fit,
                    profile=self.cfg.profile,
                    draft_vocab_size=self._speculator.draft_vocab_size,
                    head=Path(given) if given else None,
                    max_tokens=self.cfg.extract.max_tokens,
                    prompts=conversations,
                    answers=answers,
                    info=self.opened.info,
                    measured=measured_rows(self.cfg),
                )
            ),
        )

    @cached_property
    def states(self) -> Artifact | None:
        """The hidden-state store; None where states are made while training."""
        if self.cfg.extract.mode is ExtractMode.online:
            return None
        answers = self.generate
        return self._make(
            "extract",
            lambda folder: extract.run(
                folder,
                config=self.cfg.extract,
                aux_layers=self._aux_layers,
                answers=answers,
                target=self.opened.loaded,
            ),
        )

    @property
    def extract(self) -> Artifact:
        if self.states is None:
            raise ValueError("extract.mode must be store for stage=extract, got online")
        return self.states

    @cached_property
    def train(self) -> Artifact:
        answers, mixture, states = self.generate, self.fit, self.states
        runtime = self.cfg.runtime
        return self._make(
            "train",
            lambda folder: train.run(
                train.TrainJob(
                    folder=folder,
                    config=self.cfg.train,
                    speculator=self._speculator,
                    extract=self.cfg.extract,
                    weights=self.weights,
                    seed=self.cfg.seed,
                    answers=answers,
                    fit=mixture,
                    states=states,
                    # One process uses what is in memory; several open it each.
                    open_target=(lambda: self.opened.loaded)
                    if runtime.num_processes == 1
                    else self.opened.open_served,
                    wandb_project=runtime.wandb_project if runtime.wandb else None,
                ),
                num_processes=runtime.num_processes,
            ),
        )

    @cached_property
    def measure(self) -> Artifact:
        conversations = self.prompts
        heads = {"eagle3": self.train} | more_heads(self.cfg)
        if self.cfg.measure.full_precision_head:
            heads["full_precision"] = _Path(unquantized(self.cfg)).train
        made = self._make(
            "measure",
            lambda folder: measure.run(
                folder,
                config=self.cfg.measure,
                profile=self.cfg.profile,
                seed=self.cfg.seed,
                prompts=conversations,
                speculators=heads,
                engine=self.opened.engine,
            ),
        )
        measure.check_floor(made, self.cfg.measure.floor)
        return made

    @cached_property
    def predict(self) -> Artifact:
        measured, speculator = self.measure, self.train
        return self._make(
            "predict",
            lambda folder: predict.run(
                predict.PredictJob(
                    folder=folder,
                    config=self.cfg.predict,
                    hardware=self.cfg.hardware,
                    profile=self.cfg.profile,
                    acceptance=read_json(measured.file("acceptance.json"))["rows"],
                    info=self.opened.info,
                    open_engine=lambda: self.opened.engine,
                    speculator=speculator,
                    seed=self.cfg.seed,
                )
            ),
        )

    @cached_property
    def export(self) -> Artifact:
        conversations, speculator = self.prompts, self.train
        # A target that is quantized here is another one than its file has.
        gguf = None if self.cfg.quantize.budget else self.location.gguf_path
        return self._make(
            "export",
            lambda folder: export.run(
                export.ExportJob(
                    folder=folder,
                    config=self.cfg.export,
                    prompts=conversations,
                    speculator=speculator,
                    target=self.opened.loaded,
                    target_gguf=gguf,
                )
            ),
        )

    @cached_property
    def bench(self) -> Artifact:
        conversations, measured, speculator = self.prompts, self.measure, self.train
        return self._make(
            "bench",
            lambda folder: bench.run(
                bench.BenchJob(
                    folder=folder,
                    config=self.cfg.bench,
                    prompts=conversations,
                    measured=measured,
                    speculator=speculator,
                    target=self.opened.loaded,
                    source=self.opened.served_folder,
                    gguf=self.location.gguf_path,
                )
            ),
        )

    @cached_property
    def report(self) -> Artifact:
        inputs = {
            name: getattr(self, name).folder()
            for name in ("prompts", "generate", "fit", "train", "measure", "predict", "export")
        }
        # Not `folder()`: that would read all hidden states, and weights, for their checksums.
        states = self.states.file("store.json").parent if self.states else None
        quantized = self.quantize.file("recipe.json").parent if self.cfg.quantize.budget else None
        return self._make(
            "report",
            lambda folder: report.run(
                report.ReportJob(
                    folder,
                    **inputs,
                    quantize=quantized,
                    bench=self.bench.file(bench.FIGURES) if self.cfg.report.bench else None,
                    extract=states,
                    provenance=provenance(
                        self.cfg, self.recipes, self.train, self.location, self.opened.info
                    ),
                    matrix=measured_heads(self.cfg.report.matrix, _Path),
                    report=self.cfg.report,
                )
            ),
        )
