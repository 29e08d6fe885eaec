"""The configuration, as types: a key that is not a field below is an error."""

import re
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import cast

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from specfit.checks import require, require_positive
from specfit.export.config import ExportConfig
from specfit.latency.config import BenchConfig
from specfit.measure_config import MeasureConfig
from specfit.prediction.config import HardwareConfig, PredictConfig
from specfit.quantization.config import QuantizeConfig
from specfit.serve_config import ServeConfig
from specfit.traffic.config import FitConfig, ProfileConfig
from specfit.traffic.fingerprint_config import DriftConfig, FingerprintConfig
from specfit.training.config import TrainConfig
from specfit_data.sources import Source

HERE = Path(__file__).parent
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # a wheel | a checkout


class Stage(Enum):
    """How far to run; `status` makes nothing. OmegaConf reads members by name."""

    status = 0
    target = 1
    prompts = 2
    profile = 3
    fingerprint = 4
    sensitivity = 5
    quantize = 6
    generate = 7
    fit = 8
    extract = 9
    train = 10
    measure = 11
    drift = 12
    predict = 13
    export = 14
    bench = 15
    report = 16
    serve = 17


class LossOn(Enum):
    """Which assistant turns are learned from."""

    all_turns = 1
    last_turn = 2


class StateDtype(Enum):
    """How hidden states are stored; int8 and fp8 carry one scale per token and layer."""

    fp32 = 1
    bf16 = 2
    int8 = 3
    fp8 = 4


class ExtractMode(Enum):
    """A store on disk, or states computed while training."""

    store = 1
    online = 2


class Engine(Enum):
    """What runs the target's passes while decoding."""

    auto = 1  # the CPU kernels where they run the target, transformers elsewhere
    torch = 2  # transformers
    fp4 = 3  # the kernels, or an error that says why they cannot


class Init(Enum):
    """What a speculator starts from."""

    target = 1  # the target's last layer, its head's rows, an average of the aux layers
    random = 2


@dataclass
class TargetConfig:
    """The model that is sped up; it is never trained. Its sizes are read, not configured."""

    path: str = MISSING  # a hub id, a folder, a .gguf file, or package:NAME/FILE
    revision: str = "main"  # of a hub id
    gguf_file: str | None = None  # the file to read when `path` is a hub id or folder of GGUF files
    dtype: str = "auto"  # auto (the checkpoint's; float32 on a CPU) | float32 | bfloat16 | float16
    trust_remote_code: bool = False  # run the model code that comes with the checkpoint

    def __post_init__(self) -> None:
        dtypes = ("auto", "float32", "bfloat16", "float16")
        require(self.dtype in dtypes, "target.dtype", f"be one of {', '.join(dtypes)}", self.dtype)


@dataclass
class DataConfig:
    """Where conversations come from, and which are kept."""

    sources: dict[str, Source] = field(default_factory=dict)
    num_train: int = 200  # conversations, shared out by the profile's weights
    num_validation: int = 16  # choose the checkpoint
    num_test: int = 64  # measured on; never seen before
    min_prompt_tokens: int = 1
    max_prompt_tokens: int = 2048  # longer prompts are passed over
    max_rejected: float = 0.05  # share of conversations that may fail to render
    loss_on: LossOn = LossOn.all_turns

    def __post_init__(self) -> None:
        require_positive(
            self, "data", "num_train", "num_validation", "num_test", "min_prompt_tokens"
        )
        require(
            self.max_prompt_tokens >= self.min_prompt_tokens,
            "data.max_prompt_tokens",
            f"be at least data.min_prompt_tokens ({self.min_prompt_tokens})",
            self.max_prompt_tokens,
        )
        require(
            0 <= self.max_rejected <= 1, "data.max_rejected", "lie in [0, 1]", self.max_rejected
        )


@dataclass
class GenerateConfig:
    """The target's own answers to the prompts."""

    on_policy: bool = True  # false: learn from the answers in the data
    max_new_tokens: int = 256
    temperature: float | None = None  # None: each component's own
    top_p: float = 1.0
    batch_size: int = 32  # sequences decoded at once

    def __post_init__(self) -> None:
        require_positive(self, "generate", "max_new_tokens", "batch_size")
        require(0 < self.top_p <= 1, "generate.top_p", "lie in (0, 1]", self.top_p)
        require(
            self.temperature is None or self.temperature >= 0,
            "generate.temperature",
            "be at least 0, or null",
            self.temperature,
        )


@dataclass
class ExtractConfig:
    """The hidden states to learn from."""

    mode: ExtractMode = ExtractMode.store
    dtype: StateDtype = StateDtype.bf16
    max_tokens: int = 4096  # a conversation is cut after this many
    shard_tokens: int = 16384  # tokens a file
    batch_size: int = 1  # conversations a forward pass
    # Keep the states that generating computes, which are those of a pass of its own to rounding:
    # that pass is saved. Not hashed. With false and batch_size=1, store and online are bit-equal.
    while_generating: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "extract", "max_tokens", "shard_tokens", "batch_size")


@dataclass
class SpeculatorConfig:
    """The draft head: EAGLE-3, one decoder layer over fused states of the target."""

    name: str = "eagle3"
    # A head that was made elsewhere, to go on from: a folder or GGUF file in any engine's layout.
    # Its own sizes, flags, layers and draft vocabulary hold; train.epochs=0 keeps it as it is.
    from_checkpoint: str | None = None
    draft_vocab_size: int = 8192  # tokens that can be drafted, the commonest in answers and prompts
    aux_layers: list[int] | None = None  # None: [2, n // 2, n - 3] of n layers
    init: Init = Init.target
    # The flags of EAGLE-3.1. All off is the portable preset that every engine serves.
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        require(self.name == "eagle3", "speculator.name", "be eagle3", self.name)
        require(
            self.draft_vocab_size >= 1,
            "speculator.draft_vocab_size",
            "be positive",
            self.draft_vocab_size,
        )
        if self.aux_layers is not None:
            require(
                sorted(set(self.aux_layers)) == list(self.aux_layers) and self.aux_layers != [],
                "speculator.aux_layers",
                "ascend, without repeats",
                self.aux_layers,
            )


@dataclass
class ReportConfig:
    """What the page shows."""

    sweep: str | None = None  # a multirun folder: compare its jobs in one table
    matrix: str | None = None  # a multirun folder over profiles: each head on each profile
    bench: bool = False  # latency, too: `stage=bench` is made first


@dataclass
class RuntimeConfig:
    """Where and how a run happens. It changes results by rounding at most, so it is not hashed."""

    root: str = "artifacts"
    device: str = "auto"  # auto | cpu | cuda | cuda:1
    num_threads: int = 0  # CPU threads of torch; 0: one a core
    engine: Engine = Engine.auto  # of decoding; the weights are the target's own in either
    num_processes: int = 1  # of training
    wandb: bool = False  # log training to Weights & Biases, offline without a key
    wandb_project: str = "specfit"
    min_free_gb: float = 1.0  # GiB that must be free before a stage starts

    def __post_init__(self) -> None:
        require(
            self.num_processes >= 1, "runtime.num_processes", "be at least 1", self.num_processes
        )
        require(self.num_threads >= 0, "runtime.num_threads", "be at least 0", self.num_threads)
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        require(known, "runtime.device", "be auto, cpu, cuda or cuda:N", self.device)
        one = self.num_processes == 1 or ":" not in self.device
        require(one, "runtime.device", "have no index with several processes", self.device)


@dataclass
class RunConfig:
    """One composed configuration describes the whole path; `stage` says how far to go."""

    stage: Stage = Stage.report
    seed: int = 0
    # MISSING, not a factory: a factory would build an instance while the schema is registered, and
    # run its __post_init__ on values that are still "???".
    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    profile: ProfileConfig = MISSING
    quantize: QuantizeConfig = MISSING
    generate: GenerateConfig = MISSING
    fit: FitConfig = MISSING
    extract: ExtractConfig = MISSING
    speculator: SpeculatorConfig = MISSING
    train: TrainConfig = MISSING
    measure: MeasureConfig = MISSING
    hardware: HardwareConfig = MISSING
    predict: PredictConfig = MISSING
    fingerprint: FingerprintConfig = MISSING
    drift: DriftConfig = MISSING
    export: ExportConfig = MISSING
    bench: BenchConfig = MISSING
    serve: ServeConfig = MISSING
    report: ReportConfig = MISSING
    runtime: RuntimeConfig = MISSING


def register() -> None:
    """Puts the schema where `conf/config.yaml` names it."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def typed(cfg: DictConfig) -> RunConfig:
    """The composed `cfg` as plain dataclasses: resolved, complete and checked.

    Raises:
        ValueError: a value is out of its range, or a key is not known; the message names the key.
    """
    run = OmegaConf.to_object(cfg)
    assert isinstance(run, RunConfig)
    _reject_unknown(run, "")
    return run


def job_config(folder: Path) -> RunConfig:
    """What a job of a sweep ran with, from the folder that Hydra gave it.

    Raises:
        FileNotFoundError: it holds no configuration.
        ValueError: as `typed`; the job may be of another version.
    """
    path = folder / ".hydra" / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must be the folder of a job, it has no {path.name}")
    schema = OmegaConf.structured(RunConfig)
    return typed(cast(DictConfig, OmegaConf.merge(schema, OmegaConf.load(path))))


def _reject_unknown(node: object, path: str) -> None:
    # `+train.leraning_rate=1` appends past the schema, and to_object() keeps what was appended.
    if isinstance(node, dict):
        for name, value in node.items():
            _reject_unknown(value, f"{path}{name}.")
    if isinstance(node, list):
        for i, value in enumerate(node):
            _reject_unknown(value, f"{path.rstrip('.')}[{i}].")
    if not is_dataclass(node):
        return
    known = {f.name for f in fields(node)}
    for name, value in vars(node).items():
        if name not in known:
            raise ValueError(f"unknown key {path}{name}; known here: {', '.join(sorted(known))}")
        _reject_unknown(value, f"{path}{name}.")
