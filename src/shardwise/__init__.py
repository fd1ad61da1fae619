"""Shardwise: ZeRO for PyTorch. One engine for stages 0 to 3; the public names, nothing else."""

from shardwise.access import (
    full_gradients,
    full_optimizer_state,
    full_parameters,
    full_state_dict,
    iterate_full_parameters,
    local_gradients,
    local_optimizer_state,
    local_parameters,
    measured_bytes,
)
from shardwise.accounting.report import MemoryReport, memory_report
from shardwise.accounting.shortage import explain_memory
from shardwise.api import (
    clip_grad_norm_,
    clip_grad_value_,
    no_sync,
    plan,
    scale_loss,
    shard,
    unshard_model,
    unsharded,
)
from shardwise.checkpoint.calls import load_checkpoint, save_checkpoint, wait_for_save
from shardwise.checkpoint.load import Loaded
from shardwise.engine import Engine
from shardwise.errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    NonFiniteError,
    OffloadError,
    RankMismatchError,
    ShardwiseError,
    StateError,
)
from shardwise.initial.recipe import Recipe, deferred_init
from shardwise.initial.weights import from_weights
from shardwise.memory import OutOfMemoryError
from shardwise.optim.shard import ShardedOptimizer, shard_optimizer
from shardwise.precision import LossScale, Precision
from shardwise.sharding import Sharding, hybrid, stage_sharding
from shardwise.simulation.calls import Simulation, Verification, simulate, verify
from shardwise.start import initialize
from shardwise.trace.calls import Timeline, timeline

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "LayoutError",
    "Loaded",
    "LossScale",
    "MemoryReport",
    "NonFiniteError",
    "OffloadError",
    "OutOfMemoryError",
    "Precision",
    "RankMismatchError",
    "Recipe",
    "ShardedOptimizer",
    "Sharding",
    "ShardwiseError",
    "Simulation",
    "StateError",
    "Timeline",
    "Verification",
    "__version__",
    "clip_grad_norm_",
    "clip_grad_value_",
    "deferred_init",
    "explain_memory",
    "from_weights",
    "full_gradients",
    "full_optimizer_state",
    "full_parameters",
    "full_state_dict",
    "hybrid",
    "initialize",
    "iterate_full_parameters",
    "load_checkpoint",
    "local_gradients",
    "local_optimizer_state",
    "local_parameters",
    "measured_bytes",
    "memory_report",
    "no_sync",
    "plan",
    "save_checkpoint",
    "scale_loss",
    "shard",
    "shard_optimizer",
    "simulate",
    "stage_sharding",
    "timeline",
    "unshard_model",
    "unsharded",
    "verify",
    "wait_for_save",
]
