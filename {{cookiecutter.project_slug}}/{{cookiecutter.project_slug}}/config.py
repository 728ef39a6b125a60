"""Every setting of a run: its default, its unit and its check."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from .model import ModelConfig


class SettingError(ValueError):
    """A flag, setting or data set that cannot be used: the message says why and what to do."""


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    """Update rule (sgd has momentum 0.9; muon is for kernels and leaves all else to adamw)."""
    learning_rate: float = 3e-3
    """Peak learning rate, reached after the warm-up."""
    warmup_steps: int = 100
    """Updates over which the learning rate rises to its peak; at most half of the run."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """What follows the warm-up (wsd: constant, then linear to 0 over the last fifth)."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on arrays named kernel only."""
    clip_norm: float = 1.0
    """Largest global gradient norm (0 = no clipping)."""


@dataclass(frozen=True)
class DataConfig:
    source: Literal["auto", "builtin", "path"] = "auto"
    """Where the data comes from (auto: from --data.path, and without it what is built in)."""
    path: str | None = None
    """Where your own data is (data.py says in which form)."""
    workers: int = 0
    """Threads that prepare batches ahead (0 = prepared in the loop: best for data in memory)."""


@dataclass(frozen=True)
class MeshConfig:
    data: int = -1
    """Devices along the data axis: each holds the whole model (-1 = all that are left)."""
    fsdp: int = 1
    """Devices along the fsdp axis: parameters and optimizer state are split over them."""


@dataclass(frozen=True)
class Config:
    workdir: str | None = None
    """Run directory; an existing run is resumed (default: a new one, runs/<date-time>)."""
    total_steps: int | None = None
    """Length of the run in steps, one global batch each (default 600, unless --epochs)."""
    epochs: float | None = None
    """Length of the run in passes over the training data, instead of --total-steps."""
    batch_size: int = 32
    """Rows in the global batch, over all devices and processes."""
    seed: int = 0
    """Seed of the initial parameters, the data order and dropout."""
    log_every: int = 100
    """Steps between two log lines."""
    eval_every: int | None = None
    """Steps between two evaluations (0 = off; default: one epoch)."""
    eval_batches: int = 0
    """Batches that an evaluation scores, spread evenly over the split (0 = all of it)."""
    checkpoint_every: int = 1000
    """Steps between two checkpoints (0 = off); a new best and the last step are always saved."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the computation; parameters, optimizer and loss stay in float32."""
    accumulation_steps: int = 1
    """Micro-batches that a global batch is split into to save memory."""
    ema_decay: float = 0.0
    """Decay of the averaged parameters that evaluation then uses (0 = off); lower at first."""
    early_stopping_patience: int = 0
    """Evaluations without a new best after which the run ends (0 = off)."""
    max_skipped_steps: int = 25
    """Non-finite updates in a row, all skipped, after which the run counts as diverged."""
    init_from: str | None = None
    """Run or checkpoint directory whose parameters a new run starts from; not read on resume."""
    stop_after_step: int | None = None
    """Save and exit with 75 after this step, as if preempted."""
    overfit_batches: int = 0
    """Train on the first N batches over and over (0 = off): first aid when nothing is learned."""
    profile_steps: str | None = None
    """Steps A:B to record for TensorBoard's profiler, such as 20:30."""
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Hardware to run on; anything but auto fails when it is not there."""
    deterministic: bool = False
    """Bit-equal results on GPU too, at some cost in speed."""
    debug_nans: bool = False
    """Stop with a traceback where the first NaN is made; slow."""
    stall_timeout: int = 1800
    """Seconds without a finished step after which the run ends and shows every stack (0 = off).
    All that is no training step, such as compiling and saving, may take ten times as long."""
    quiet: bool = False
    """Print warnings and errors only; train.log still gets everything."""
    optimizer: OptimizerConfig = OptimizerConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()

    @property
    def profile_range(self) -> tuple[int, int] | None:
        """First and one past the last step to profile. Raises ValueError for anything but A:B."""
        if self.profile_steps is None:
            return None
        first, last = self.profile_steps.split(":")
        return int(first), int(last)


def resolve(config: Config, rows: int) -> Config:
    """Fill in the settings whose defaults depend on other settings or on the training rows."""
    steps_per_epoch = rows // config.batch_size
    if steps_per_epoch == 0:
        raise SettingError(
            f"--batch-size {config.batch_size}: must be at most {rows}, the rows of training data"
        )
    total = config.total_steps
    if total is None:
        total = 600 if config.epochs is None else max(round(config.epochs * steps_per_epoch), 1)
    every = steps_per_epoch if config.eval_every is None else config.eval_every
    source: Literal["builtin", "path"] = "path" if config.data.path else "builtin"
    settings = dataclasses.replace(config.data, source=source)
    return dataclasses.replace(
        config, total_steps=total, epochs=None, eval_every=every, data=settings
    )


# Smallest allowed value of each number; None (not given) is always allowed.
MINIMUM = {
    "total_steps": 1,
    "batch_size": 1,
    "seed": 0,
    "log_every": 1,
    "eval_every": 0,
    "eval_batches": 0,
    "checkpoint_every": 0,
    "accumulation_steps": 1,
    "ema_decay": 0.0,
    "early_stopping_patience": 0,
    "max_skipped_steps": 0,
    "stop_after_step": 1,
    "overfit_batches": 0,
    "stall_timeout": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.0,
    "data.workers": 0,
    "mesh.fsdp": 1,
}


def check(config: Config) -> None:
    """Raise SettingError for the first setting that is wrong, whatever the data and devices."""
    values = flatten(config)
    for name, least in MINIMUM.items():
        if values[name] is not None:
            require(least <= values[name] < math.inf, name, values[name], f"at least {least}")
    lr, decay, mesh_data = config.optimizer.learning_rate, config.ema_decay, config.mesh.data
    require(0 < lr < math.inf, "optimizer.learning_rate", lr, "above 0")
    require(decay < 1, "ema_decay", decay, "below 1")
    require(mesh_data >= 1 or mesh_data == -1, "mesh.data", mesh_data, "at least 1, or -1")
    require(config.seed < 2**32, "seed", config.seed, "below 2**32")
    if config.epochs is not None:
        require(0 < config.epochs < math.inf, "epochs", config.epochs, "above 0")
        if config.total_steps is not None:
            raise SettingError("--total-steps and --epochs both set the length of a run: give one")
    micro = config.batch_size % config.accumulation_steps
    rule = f"a multiple of --accumulation-steps {config.accumulation_steps}"
    require(micro == 0, "batch_size", config.batch_size, rule)
    if config.data.source == "path" and not config.data.path:
        raise SettingError("--data.source path needs --data.path, the place of your data")
    if config.data.source == "builtin" and config.data.path:
        raise SettingError(
            f"--data.source builtin does not read --data.path {config.data.path}: give one of them"
        )
    if config.early_stopping_patience and config.eval_every == 0:
        raise SettingError(
            f"--early-stopping-patience {config.early_stopping_patience}: counts evaluations, and "
            f"--eval-every 0 makes none: give one of them another value"
        )
    if config.early_stopping_patience and config.overfit_batches:
        raise SettingError(
            f"--early-stopping-patience {config.early_stopping_patience}: would end a run with "
            f"--overfit-batches {config.overfit_batches}, which is not to improve on other data: "
            f"leave one out"
        )
    if config.debug_nans and config.precision == "float16":
        raise SettingError(
            "--debug-nans ends the run at the first overflow, and --precision float16 overflows "
            "on purpose to find its loss scale: use --precision float32 or bfloat16"
        )
    if config.profile_steps is not None:
        try:
            first, last = config.profile_range
        except ValueError:
            first, last = 1, 0
        rule = "two steps A:B with 0 <= A < B"
        require(0 <= first < last, "profile_steps", config.profile_steps, rule)
    config.model.check(require)


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise SettingError naming the flag, its value and the rule, unless the rule holds."""
    if not holds:
        raise SettingError(f"{flag(name)} {value}: must be {rule}")


def flag(name: str) -> str:
    """'optimizer.learning_rate' as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, such as {'optimizer.learning_rate': 0.003}."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, name + ".")
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


def build(cls: type, values: dict[str, Any]) -> Any:
    """A (nested) dataclass from JSON; settings that it does not have any more are left out."""
    fields = {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            value = values[field.name]
            if dataclasses.is_dataclass(field.default):
                value = build(type(field.default), value)
            fields[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**fields)
