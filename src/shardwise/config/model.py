"""The settings a user can write, as one tree of pydantic models: names, types, limits, defaults.

Strict: an unknown key, a wrong type or an impossible number is an error. The core never sees these classes; it takes
the frozen dataclasses made from them. Read ``resolve.py`` for what follows from several settings together.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "BatchConfig",
    "Config",
    "LossScaleConfig",
    "OptimizerConfig",
    "OverlapConfig",
    "PrecisionConfig",
    "SchedulerConfig",
]

DtypeName = Literal["fp32", "bf16", "fp16", "fp64"]
MAX_COUNT = (1 << 63) - 1  # of an int64
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Betas = Annotated[list[Fraction], Field(min_length=2, max_length=2)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
ZeroToThree = Annotated[int, Field(ge=0, le=3)]  # a Literal would take true for 1
Rates = Rate | Annotated[list[Rate], Field(min_length=1)]
Fractions = Fraction | Annotated[list[Fraction], Field(min_length=1)]


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class BatchConfig(Section):
    """Samples per update; ``size = micro * accumulation * data-parallel ranks``, any two give the third."""

    size: Positive | None = None
    """Samples per update, over all ranks."""
    micro: Positive | None = None
    """Samples per forward on one rank."""
    accumulation: Positive | None = None
    """Forwards per update (the window)."""
    drop_last: bool = False
    """Leave out the last, smaller micro-batch of the data loader."""


class PrecisionConfig(Section):
    """Dtypes of each state; None follows the parameters' dtype (see ``shardwise.Precision``)."""

    param: DtypeName | None = None
    """Cast parameters to it; None leaves them as they are."""
    wire: DtypeName | None = None
    """Gradients between ranks."""
    accumulate: DtypeName | None = None
    """Gradients at rest."""
    master: DtypeName | None = None
    """What the optimizer updates."""


class LossScaleConfig(Section):
    """Loss scale of fp16 training (see ``shardwise.LossScale``)."""

    fixed: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """A scale that never changes; None: dynamic."""
    initial: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 65536.0
    """First dynamic scale."""
    growth_interval: Positive = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: Positive = 2
    """Overflows to bear before the scale is halved."""
    consecutive_hysteresis: bool = False
    """Bear that many again after each clean step, not only after growth."""
    minimum: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """The scale never falls below; an overflow there is an error."""


class _Optimizer(Section):
    lr: Rate = 1e-3
    """Learning rate."""
    weight_decay: Rate = 0.0
    """Weight decay."""


class AdamConfig(_Optimizer):
    """``torch.optim.Adam``: the decay is added to the gradient."""

    name: Literal["adam"]
    betas: Betas = Field(default_factory=lambda: [0.9, 0.999])
    """Decay of the first and second moment."""
    eps: Rate = 1e-8
    """Added to the root of the second moment."""
    amsgrad: bool = False
    """Keep the largest second moment."""


class AdamWConfig(_Optimizer):
    """``torch.optim.AdamW``: the decay is taken from the weights."""

    name: Literal["adamw"]
    betas: Betas = Field(default_factory=lambda: [0.9, 0.999])
    """Decay of the first and second moment."""
    eps: Rate = 1e-8
    """Added to the root of the second moment."""
    amsgrad: bool = False
    """Keep the largest second moment."""


class SGDConfig(_Optimizer):
    """``torch.optim.SGD``."""

    name: Literal["sgd"]
    momentum: Fraction = 0.0
    """Decay of the momentum."""
    dampening: Finite = 0.0
    """Dampening of the momentum."""
    nesterov: bool = False
    """Nesterov's momentum."""


class AdagradConfig(_Optimizer):
    """``torch.optim.Adagrad``."""

    name: Literal["adagrad"]
    lr: Rate = 1e-2
    """Learning rate."""
    lr_decay: Rate = 0.0
    """Decay of the learning rate."""
    eps: Rate = 1e-10
    """Added to the root of the sum."""
    initial_accumulator_value: Rate = 0.0
    """Start of the sum of squares."""


class LionConfig(_Optimizer):
    """Lion (Chen et al., arXiv:2302.06675)."""

    name: Literal["lion"]
    lr: Rate = 1e-4
    """Learning rate."""
    betas: Betas = Field(default_factory=lambda: [0.9, 0.99])
    """Weight of the momentum in the update, and its decay."""


OptimizerConfig = Annotated[
    AdamConfig | AdamWConfig | SGDConfig | AdagradConfig | LionConfig, Field(discriminator="name")
]


class WarmupConfig(Section):
    """Rise from ``min_lr`` to ``max_lr``, then stay."""

    name: Literal["warmup"]
    min_lr: Rates = 0.0
    """Learning rate at the start."""
    max_lr: Rates | None = None
    """Learning rate after the warm-up; None: the optimizer's."""
    num_warmup_steps: Positive = 1000
    """Length of the warm-up."""
    shape: Literal["log", "linear"] = "log"
    """How the rate rises."""


class WarmupDecayConfig(Section):
    """Rise from ``min_lr`` to ``max_lr``, then fall linearly to 0."""

    name: Literal["warmup_decay"]
    total_steps: Positive
    """Steps until the rate is 0."""
    min_lr: Rates = 0.0
    """Learning rate at the start."""
    max_lr: Rates | None = None
    """Learning rate after the warm-up; None: the optimizer's."""
    num_warmup_steps: Positive = 1000
    """Length of the warm-up."""
    shape: Literal["log", "linear"] = "log"
    """How the rate rises."""


class WarmupCosineConfig(Section):
    """Rise from a fraction of the optimizer's rate to it, then fall along a cosine."""

    name: Literal["warmup_cosine"]
    total_steps: Positive
    """Steps until the end of the cosine."""
    num_warmup_steps: Positive = 1000
    """Length of the warm-up."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the rate at the start."""
    end_ratio: Annotated[float, Field(ge=0, le=1)] = 1e-4
    """Fraction of the rate at the end."""
    shape: Literal["log", "linear"] = "log"
    """How the rate rises."""


class RangeTestConfig(Section):
    """Raise the rate step by step to find the largest that trains."""

    name: Literal["lr_range_test"]
    min_lr: Rates = 1e-3
    """Learning rate at the start."""
    interval: Positive = 2000
    """Steps between rises."""
    growth: Rate = 1.0
    """Rise per interval, as a fraction of ``min_lr``."""
    staircase: bool = False
    """Rise once per interval instead of at every step."""


class OneCycleConfig(Section):
    """Rise to ``max_lr`` and back (with the momentum the other way), then decay."""

    name: Literal["one_cycle"]
    min_lr: Rates
    """Learning rate at both ends of the cycle."""
    max_lr: Rates
    """Learning rate at the top."""
    decay_rate: Rate = 0.0
    """Decay of the rate per ``decay_interval`` after the cycle."""
    num_rise_steps: Positive = 2000
    """Steps of the rise."""
    num_fall_steps: Count | None = None
    """Steps of the fall; None: as many as of the rise."""
    rise_stairs: Count = 0
    """Stairs of the rise; 0: none."""
    fall_stairs: Count | None = None
    """Stairs of the fall; None: as many as of the rise."""
    decay_interval: Count = 0
    """Steps per decay; 0: no decay."""
    cycle_momentum: bool = True
    """Cycle the momentum (or the first beta) against the rate."""
    min_momentum: Fractions = 0.8
    """Momentum at the top of the cycle."""
    max_momentum: Fractions = 0.9
    """Momentum at both ends."""
    momentum_decay_rate: Finite = 0.0
    """Growth of the momentum per ``decay_interval`` after the cycle; below 0 it falls."""


SchedulerConfig = Annotated[
    WarmupConfig | WarmupDecayConfig | WarmupCosineConfig | RangeTestConfig | OneCycleConfig,
    Field(discriminator="name"),
]


class OverlapConfig(Section):
    """How much communication and memory may run ahead (see ``shardwise.shard``)."""

    prefetch: Count = 1
    """Units gathered ahead of their use."""
    reductions_in_flight: Count = 2
    """Buckets whose gradients travel while the backward goes on."""
    keep_last_unit: bool = True
    """Do not free the last unit between forward and backward."""


class ModelConfig(Section):
    """The model that ``shardwise train`` builds or loads."""

    name: str = "gpt-mini"
    """Name of a built-in model, or the folder of a Hugging Face model."""
    context: Positive | None = None
    """Longest sequence, in tokens; None: the model's own."""
    vocab: Positive | None = None
    """Tokens that a built-in model knows; None: those of the tokenizer."""
    depth: Positive | None = None
    """Blocks of a built-in model; None: its own number."""
    activation_checkpointing: bool = False
    """Keep only the input of each block, and compute the rest again in backward."""


class DataConfig(Section):
    """The text that ``shardwise train`` reads."""

    path: str | list[str] | None = None
    """Text file, JSONL file or folder, or several of them; None: the source of Python's own library."""
    field: str = "text"
    """Key of the text in a JSONL line."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a ``tokenizer.json``."""
    end_token: str | None = None
    """Token of the tokenizer that ends a document; None: a common one that it has, for bytes the byte 0."""
    pack: bool | None = None
    """Cut windows out of all text in a row, or train on one document after the other; None: only JSONL alone is not
    packed."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Fraction of the text kept for evaluation, at least one window; 0: none."""


class TrainConfig(Section):
    """How long ``shardwise train`` runs, and what it reports."""

    steps: Positive = 1000
    """Updates."""
    eval_every: Count = 100
    """Updates between evaluations; 0: only at the end."""
    eval_batches: Positive = 8
    """Micro-batches per rank and evaluation."""
    sample_tokens: Count = 300
    """Tokens of the sample at the end; 0: none."""
    sample_prompt: str | None = None
    """Start of the sample; None: a new line, and a "def" on it where the text is Python's own library."""
    sample_every: Count = 0
    """Updates between samples; 0: only at the end."""
    sample_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.7
    """Divisor of the logits when a token is drawn; 0: always the likeliest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; "auto": on CUDA devices if there is one for each rank of this machine."""
    output: str = "runs/train"
    """Folder for metrics.jsonl, the logs of each rank, the checkpoints and the final weights."""
    checkpoint_every: Count = 100
    """Updates between checkpoints, of which one is written at the end too; 0: none at all."""
    checkpoint_keep: Positive = 2
    """Number of checkpoints that stay."""
    checkpoint_background: bool = False
    """Write checkpoints beside training: it stands still for one copy in memory only."""
    timeline_steps: Count = 0
    """First updates of which each rank writes a timeline into the folder; 0: none."""
    timeline_activations: bool = False
    """Count activations and temporaries on the timeline too, which is slow."""


class Config(Section):
    """Everything that can be set. ``initialize`` reads all but the last three sections."""

    stage: ZeroToThree = 3
    """ZeRO stage."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """Losses of ranks and micro-batches are averaged, or summed and divided by a count given to ``backward``."""
    clip_grad_norm: Rate | None = None
    """Largest norm of the mean gradient; None or 0: no clipping."""
    on_nonfinite: Literal["skip", "raise", "ignore"] = "skip"
    """What a step does whose gradients are not finite."""
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    """Of data order and of a built-in model's values."""
    log_every: Positive | None = None
    """Updates between lines of the log; None: none."""
    batch: BatchConfig = BatchConfig()
    """Batch arithmetic."""
    precision: PrecisionConfig = PrecisionConfig()
    """Dtypes."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """fp16 only."""
    optimizer: OptimizerConfig | None = None
    """None: the caller brings one."""
    scheduler: SchedulerConfig | None = None
    """None: the caller brings one, or the rate is constant."""
    overlap: OverlapConfig = OverlapConfig()
    """Communication ahead of use."""
    model: ModelConfig = ModelConfig()
    """For ``shardwise train``."""
    data: DataConfig = DataConfig()
    """For ``shardwise train``."""
    train: TrainConfig = TrainConfig()
    """For ``shardwise train``."""
