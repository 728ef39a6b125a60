"""Every setting of a run: its default, its unit and its check."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from .model import ModelConfig
from .runtime.settings import SettingError, check_minima, require, setting
from .sources import DataConfig
from .task import TaskConfig


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    """Update rule (sgd has momentum 0.9; muon updates kernels and leaves the rest to Adam)."""
    learning_rate: float = 3e-3
    """Peak learning rate, reached after the warm-up."""
    warmup_steps: int = setting(100, least=0)
    """Updates in which the learning rate rises to its peak; at most half of the run."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """What follows the warm-up (wsd: constant, then linear to 0 over the last fifth)."""
    weight_decay: float = setting(0.01, least=0.0)
    """Decoupled weight decay, of parameters named kernel only."""
    clip_norm: float = setting(1.0, least=0.0)
    """Largest global gradient norm (0 = no clipping)."""


@dataclass(frozen=True)
class MeshConfig:
    data: int = setting(-1, resume="allowed")
    """Copies of the model, each trained on a part of the batch (-1 = devices / fsdp)."""
    fsdp: int = setting(1, least=1, resume="allowed")
    """Devices that parameters and optimizer state are split over."""


@dataclass(frozen=True)
class Config:
    workdir: str | None = setting(None, resume="per start")
    """Run directory; an existing run is resumed (default: a new one, runs/<date-time>)."""
    total_steps: int | None = setting(None, least=1, resume="allowed")
    """Length of the run in steps, one global batch each (default 600, unless --epochs)."""
    epochs: float | None = None
    """Length of the run in passes over the training data, instead of --total-steps; not for a
    stream, whose length is not known."""
    batch_size: int = setting(32, least=1)
    """Rows in the global batch, over all devices and processes."""
    seed: int = setting(0, least=0)
    """Seed of the initial parameters, the data order and dropout."""
    log_every: int = setting(100, least=1, resume="allowed")
    """Steps between two log lines."""
    eval_every: int | None = setting(None, least=0, resume="allowed")
    """Steps between two evaluations (0 = off; default: one epoch, and 1000 for a stream)."""
    eval_batches: int = setting(0, least=0)
    """Batches that an evaluation scores, spread evenly over the split (0 = all of it)."""
    checkpoint_every: int = setting(1000, least=0, resume="allowed")
    """Steps between two checkpoints (0 = off); a new best and the last step are always saved."""
    precision: Literal["float32", "bfloat16", "float16"] = setting(
        "float32",
        resume="allowed",
        meaning="from here on the network computes in it; parameters stay float32",
    )
    """Dtype of the computation; parameters, optimizer and loss stay in float32."""
    accumulation_steps: int = setting(
        1,
        least=1,
        resume="allowed",
        meaning="the same updates but for rounding, unless the network has dropout or batch "
        "normalisation, which see one micro-batch at a time",
    )
    """Micro-batches that a global batch is split into to save memory."""
    ema_decay: float = setting(0.0, least=0.0)
    """Decay of the average of parameters that evaluation uses (0 = off); lower at first."""
    early_stopping_patience: int = setting(0, least=0, resume="allowed")
    """Evaluations without a new best after which the run ends (0 = off)."""
    max_skipped_steps: int = setting(25, least=0, resume="allowed")
    """Updates skipped in a row, as not finite, after which the run ends as diverged."""
    init_from: str | None = setting(None, resume="per start")
    """Run or checkpoint directory that gives a new run its first parameters; ignored on resume."""
    stop_after_step: int | None = setting(None, least=1, resume="per start")
    """Save and exit with 75 after this step, as if preempted."""
    overfit_batches: int = setting(0, least=0)
    """Train on the first N batches again and again (0 = off), to see whether the loss can fall."""
    profile_steps: str | None = setting(None, resume="per start")
    """Steps A:B to record for TensorBoard's profiler, such as 20:30."""
    platform: Literal["auto", "cpu", "gpu", "tpu"] = setting("auto", resume="allowed")
    """Hardware to run on. The run ends if it is asked for by name and not found."""
    deterministic: bool = False
    """Make results bit-equal on GPUs too, which costs speed."""
    debug_nans: bool = setting(False, resume="allowed")
    """Stop with a traceback of the operation that makes the first NaN; slow."""
    stall_timeout: int = setting(1800, least=0, resume="allowed")
    """Seconds without a finished step after which the run ends and shows every stack (0 = off).
    Everything else, such as compiling and saving, may take ten times as long."""
    quiet: bool = setting(False, resume="allowed")
    """Print warnings and errors only; train.log still gets everything."""
    optimizer: OptimizerConfig = OptimizerConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()

    @property
    def profile_range(self) -> tuple[int, int] | None:
        """First and one past the last step to profile. Raises ValueError for anything but A:B."""
        if self.profile_steps is None:
            return None
        first, last = self.profile_steps.split(":")
        return int(first), int(last)


def resolve(config: Config, rows: int | None) -> Config:
    """Fill in the settings whose defaults depend on other settings or on the training rows.

    `rows` is None for a stream, whose length is not known. Raises SettingError if there are
    too few rows for one batch.
    """
    # Without epochs, 1000 steps stand in for one.
    steps_per_epoch = 1000 if rows is None else rows // config.batch_size
    if steps_per_epoch == 0:
        raise SettingError(
            f"--batch-size {config.batch_size}: must be at most {rows}, the rows of training data"
        )
    if rows is None and config.epochs is not None:
        raise SettingError(
            f"--epochs {config.epochs:g}: the training data is a stream, whose length is not "
            f"known: give --total-steps"
        )
    total = config.total_steps
    if total is None:
        total = 600 if config.epochs is None else max(round(config.epochs * steps_per_epoch), 1)
    every = steps_per_epoch if config.eval_every is None else config.eval_every
    return dataclasses.replace(config, total_steps=total, epochs=None, eval_every=every)


def check(config: Config) -> None:
    """Raise SettingError for the first setting that is wrong with any data and any devices."""
    check_minima(config)
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
    config.data.check()
    config.model.check()
    config.task.check()
