"""Every configuration key of DeepSpeed 0.19.8, and what becomes of it here: the table, as data.

Facts from DeepSpeed's ``runtime/config.py``, ``runtime/zero/config.py``, ``runtime/zero/offload_config.py``,
``runtime/precision_config.py``, ``runtime/lr_schedules.py`` and the other configuration files it reads. Read
``translate.py`` for how the rows are applied, ``more_keys.py`` for the rows of features beside training.
"""

from collections.abc import Mapping
from types import MappingProxyType

from shardwise.interop.deepspeed.kinds import (
    ANYTHING,
    BOOL,
    COUNT,
    DTYPE,
    FINITE,
    FRACTION,
    INTEGER,
    PAIR,
    RATE,
    RATES,
    STRINGS,
    TEXT,
    WHOLE,
    Fate,
    Key,
    one_of,
    or_null,
)
from shardwise.interop.deepspeed.more_keys import MORE_KEYS, rows

__all__ = ["ALIASES", "KEYS", "MISSPELLINGS", "OPTIMIZERS", "OPTIMIZERS_REFUSED", "SCHEDULERS"]

SAME, MAPPED, NO_EFFECT, LATER, REFUSED = Fate.SAME, Fate.MAPPED, Fate.NO_EFFECT, Fate.LATER, Fate.REFUSED

BUCKETS = "each unit travels in its own buckets; overlap.reductions_in_flight bounds their memory"
GATHERS = "units are gathered as wholes; overlap.prefetch and overlap.keep_last_unit bound their memory"
LAYOUT = "the layout of buffers and the choice of collectives are fixed here; results do not depend on them"
CHECKS = "it configures checks or messages of DeepSpeed's own implementation"
AVERAGE = "it orders the divisions around the sum over ranks, which is taken in fp32 here"
TIMINGS = "this version prints no such report; the result does not depend on it"
ANY_OPTIMIZER = "every element-wise torch optimizer works, and none is replaced"

# fmt: off
TOP = (
    Key("train_batch_size", COUNT, SAME, "batch.size"),
    Key("train_micro_batch_size_per_gpu", COUNT, SAME, "batch.micro"),
    Key("gradient_accumulation_steps", COUNT, SAME, "batch.accumulation"),
    Key("managed_gradient_accumulation", BOOL, REFUSED, quiet=(True,),
        why="call engine.set_gradient_accumulation_boundary(True) before the step that updates"),
    Key("gradient_clipping", RATE, SAME, "clip_grad_norm", absent="1.0; 0 switches it off"),
    Key("steps_per_print", or_null(ANYTHING), MAPPED, "log_every", quiet=(None,),
        why="infinity and null print nothing"),
    Key("zero_allow_untested_optimizer", BOOL, NO_EFFECT, why=ANY_OPTIMIZER),
    Key("zero_force_ds_cpu_optimizer", BOOL, NO_EFFECT, why=ANY_OPTIMIZER),
    Key("communication_data_type", or_null(DTYPE), MAPPED, "precision.wire", quiet=(None,)),
    Key("seq_parallel_communication_data_type", or_null(DTYPE), NO_EFFECT,
        why="there is no sequence parallelism here that would use it"),
    Key("prescale_gradients", BOOL, NO_EFFECT, quiet=(False,), why=AVERAGE),
    Key("gradient_predivide_factor", RATE, NO_EFFECT, quiet=(1,), why=AVERAGE),
    Key("gradient_allreduce_op", one_of("mean", "sum"), REFUSED, quiet=("mean",),
        why='"sum" adds the ranks\' mean losses, which depends on the number of ranks; '
            'the native loss_reduction = "sum" divides by a count that you give'),
    Key("disable_allgather", BOOL, NO_EFFECT, quiet=(False,), why="DeepSpeed 0.19.8 reads it and does not use it"),
    Key("wall_clock_breakdown", BOOL, NO_EFFECT, quiet=(False,), why=TIMINGS),
    Key("memory_breakdown", BOOL, NO_EFFECT, quiet=(False,), why=TIMINGS),
    Key("dump_state", BOOL, NO_EFFECT, quiet=(False,), why="use `shardwise explain` to see the effective settings"),
    Key("disable_python_gc", BOOL, NO_EFFECT, quiet=(False,),
        why="call gc.disable() yourself; the result does not depend on it"),
    Key("dataloader_drop_last", BOOL, SAME, "batch.drop_last"),
    Key("use_data_before_expert_parallelism", BOOL, LATER, quiet=(False,),
        why="remove it, experts are sharded as all modules are"),
    Key("sequence_parallel_size", COUNT, LATER, quiet=(1,), why="shorten the sequences, or take a higher stage"),
    Key("vocabulary_size", or_null(COUNT), NO_EFFECT, why="DeepSpeed only warns about its alignment"),
    Key("log_level", or_null(TEXT), NO_EFFECT, why='use logging.getLogger("shardwise").setLevel'),
    Key("timers.throughput.enabled", BOOL, NO_EFFECT, why=TIMINGS),
    Key("timers.throughput.synchronized", BOOL, NO_EFFECT, why=TIMINGS),
)

OPTIMIZER = (
    Key("optimizer.type", TEXT, MAPPED, "optimizer.name", why="Adam means AdamW unless adam_w_mode is false"),
    Key("optimizer.legacy_fusion", BOOL, NO_EFFECT, why="it chooses between two fp16 optimizers of DeepSpeed"),
    Key("optimizer.params.lr", RATE, SAME, "optimizer.lr"),
    Key("optimizer.params.betas", PAIR, SAME, "optimizer.betas"),
    Key("optimizer.params.eps", RATE, SAME, "optimizer.eps"),
    Key("optimizer.params.weight_decay", RATE, SAME, "optimizer.weight_decay",
        absent="0, but 0.01 for AdamW with torch_adam, as torch has it"),
    Key("optimizer.params.momentum", FRACTION, SAME, "optimizer.momentum"),
    Key("optimizer.params.dampening", FINITE, SAME, "optimizer.dampening"),
    Key("optimizer.params.nesterov", BOOL, SAME, "optimizer.nesterov"),
    Key("optimizer.params.lr_decay", RATE, SAME, "optimizer.lr_decay"),
    Key("optimizer.params.initial_accumulator_value", RATE, SAME, "optimizer.initial_accumulator_value"),
    Key("optimizer.params.amsgrad", BOOL, SAME, "optimizer.amsgrad"),
    Key("optimizer.params.torch_adam", BOOL, MAPPED, "optimizer.weight_decay", why="torch's Adam is always used"),
    Key("optimizer.params.adam_w_mode", BOOL, MAPPED, "optimizer.name", why="false: decay is added to the gradient"),
    Key("optimizer.params.fp32_optimizer_states", BOOL, LATER, quiet=(True,),
        why="the states have the dtype of the masters: precision.master"),
    Key("optimizer.params.bias_correction", BOOL, REFUSED, quiet=(True,), why="torch's Adam always corrects the bias"),
    Key("optimizer.params.set_grad_none", BOOL, NO_EFFECT, why="gradients are always None after zero_grad"),
    Key("optimizer.params.foreach", or_null(BOOL), NO_EFFECT, why="torch chooses the implementation"),
    Key("optimizer.params.fused", or_null(BOOL), NO_EFFECT, why="torch chooses the implementation"),
    Key("optimizer.params.max_grad_norm", RATE, REFUSED, why="write gradient_clipping at the top"),
    Key("optimizer.params.max_coeff", FINITE, REFUSED, why="it belongs to LAMB, which is not here"),
    Key("optimizer.params.min_coeff", FINITE, REFUSED, why="it belongs to LAMB, which is not here"),
)

SCHEDULER = (
    Key("scheduler.type", TEXT, MAPPED, "scheduler.name"),
    Key("scheduler.params.warmup_min_lr", RATES, SAME, "scheduler.min_lr"),
    Key("scheduler.params.warmup_max_lr", or_null(RATES), SAME, "scheduler.max_lr",
        absent="the optimizer's rate for WarmupLR, 0.001 for WarmupDecayLR"),
    Key("scheduler.params.warmup_num_steps", COUNT, SAME, "scheduler.num_warmup_steps"),
    Key("scheduler.params.total_num_steps", COUNT, SAME, "scheduler.total_steps"),
    Key("scheduler.params.warmup_type", one_of("log", "linear"), SAME, "scheduler.shape"),
    Key("scheduler.params.warmup_min_ratio", FRACTION, SAME, "scheduler.min_ratio"),
    Key("scheduler.params.cos_min_ratio", FRACTION, SAME, "scheduler.end_ratio"),
    Key("scheduler.params.lr_range_test_min_lr", RATES, SAME, "scheduler.min_lr"),
    Key("scheduler.params.lr_range_test_step_size", COUNT, SAME, "scheduler.interval"),
    Key("scheduler.params.lr_range_test_step_rate", RATE, SAME, "scheduler.growth"),
    Key("scheduler.params.lr_range_test_staircase", BOOL, SAME, "scheduler.staircase"),
    Key("scheduler.params.cycle_min_lr", RATES, SAME, "scheduler.min_lr"),
    Key("scheduler.params.cycle_max_lr", RATES, SAME, "scheduler.max_lr"),
    Key("scheduler.params.decay_lr_rate", RATE, SAME, "scheduler.decay_rate"),
    Key("scheduler.params.cycle_first_step_size", COUNT, SAME, "scheduler.num_rise_steps"),
    Key("scheduler.params.cycle_second_step_size", or_null(WHOLE), SAME, "scheduler.num_fall_steps"),
    Key("scheduler.params.cycle_first_stair_count", WHOLE, SAME, "scheduler.rise_stairs"),
    Key("scheduler.params.cycle_second_stair_count", or_null(WHOLE), SAME, "scheduler.fall_stairs"),
    Key("scheduler.params.decay_step_size", WHOLE, SAME, "scheduler.decay_interval"),
    Key("scheduler.params.cycle_momentum", BOOL, SAME, "scheduler.cycle_momentum"),
    Key("scheduler.params.cycle_min_mom", RATES, SAME, "scheduler.min_momentum"),
    Key("scheduler.params.cycle_max_mom", RATES, SAME, "scheduler.max_momentum"),
    Key("scheduler.params.decay_mom_rate", FINITE, SAME, "scheduler.momentum_decay_rate"),
)

PRECISION = (
    Key("fp16.enabled", BOOL, MAPPED, "precision.param", quiet=(False,)),
    Key("fp16.auto_cast", BOOL, LATER, quiet=(False,), switch="fp16.enabled",
        why="cast the inputs in the model or in the data loader"),
    Key("fp16.loss_scale", RATE, MAPPED, "loss_scale.fixed", quiet=(0,), switch="fp16.enabled", why="0 is dynamic"),
    Key("fp16.initial_scale_power", INTEGER, MAPPED, "loss_scale.initial", switch="fp16.enabled", why="2 to the power"),
    Key("fp16.loss_scale_window", COUNT, SAME, "loss_scale.growth_interval", switch="fp16.enabled"),
    Key("fp16.hysteresis", COUNT, SAME, "loss_scale.hysteresis", switch="fp16.enabled"),
    Key("fp16.consecutive_hysteresis", BOOL, SAME, "loss_scale.consecutive_hysteresis", switch="fp16.enabled"),
    Key("fp16.min_loss_scale", RATE, SAME, "loss_scale.minimum", switch="fp16.enabled"),
    Key("fp16.fp16_master_weights_and_grads", BOOL, LATER, quiet=(False,), switch="fp16.enabled",
        why='DeepSpeed has it for its CPU optimizer only; natively: precision.master = "fp16"'),
    Key("bf16.enabled", BOOL, MAPPED, "precision.param", quiet=(False,), aliases=("bfloat16.enabled",)),
    Key("bf16.immediate_grad_update", BOOL, NO_EFFECT, switch="bf16.enabled",
        why="gradients are always added as they come", aliases=("bfloat16.immediate_grad_update",)),
    Key("bf16.check_grad_overflow", BOOL, MAPPED, "on_nonfinite", quiet=(True,), switch="bf16.enabled",
        why='false: "ignore"', aliases=("bfloat16.check_grad_overflow",)),
    Key("bf16.bf16_master_weights_and_grads", BOOL, MAPPED, "precision.master, precision.accumulate", quiet=(False,),
        switch="bf16.enabled", why="only together with bf16_optimizer_states: states have the dtype of the masters",
        aliases=("bfloat16.bf16_master_weights_and_grads",)),
    Key("bf16.bf16_optimizer_states", BOOL, MAPPED, "precision.master", quiet=(False,), switch="bf16.enabled",
        why="only together with bf16_master_weights_and_grads: states have the dtype of the masters",
        aliases=("bfloat16.bf16_optimizer_states",)),
    Key("torch_autocast.enabled", BOOL, LATER, quiet=(False,),
        why="put `with torch.autocast(...)` around the forward, or set precision.param"),
    Key("torch_autocast.dtype", or_null(TEXT), LATER, quiet=(None,), switch="torch_autocast.enabled"),
    Key("torch_autocast.lower_precision_safe_modules", or_null(STRINGS), LATER, quiet=(None,),
        switch="torch_autocast.enabled"),
    Key("data_types.grad_accum_dtype", or_null(TEXT), MAPPED, "precision.accumulate", quiet=(None,),
        absent="fp32 for 16-bit parameters, where DeepSpeed takes the parameters' dtype"),
    Key("data_types.param_dtype", or_null(TEXT), MAPPED, "precision.param", quiet=(None,),
        why="has to agree with fp16.enabled and bf16.enabled"),
    Key("data_types.buffer_dtype", or_null(TEXT), LATER, quiet=(None,),
        why="buffers keep their dtype: cast them with module.to"),
    Key("data_types.keep_in_fp32_modules", STRINGS, LATER, quiet=("auto",),
        why="buffers keep their dtype: cast them with module.to"),
)

ZERO = (
    Key("zero_optimization.stage", WHOLE, SAME, "stage", absent="0"),
    *rows(
        "zero_optimization",
        NO_EFFECT,
        LAYOUT,
        {
            "contiguous_gradients": BOOL, "reduce_scatter": BOOL, "allgather_partitions": BOOL, "legacy_stage1": BOOL,
            "use_multi_rank_bucket_allreduce": BOOL, "round_robin_gradients": BOOL, "parameter_alignment": BOOL,
            "sub_group_size": WHOLE, "memory_efficient_linear": BOOL, "override_module_apply": BOOL,
        },
    ),
    *rows(
        "zero_optimization",
        NO_EFFECT,
        BUCKETS,
        {
            "reduce_bucket_size": COUNT, "allgather_bucket_size": WHOLE, "overlap_comm": or_null(BOOL),
        },
    ),
    *rows(
        "zero_optimization",
        NO_EFFECT,
        GATHERS,
        {
            "stage3_prefetch_bucket_size": WHOLE, "stage3_param_persistence_threshold": WHOLE,
            "stage3_model_persistence_threshold": WHOLE, "stage3_max_live_parameters": WHOLE,
            "stage3_max_reuse_distance": WHOLE, "stage3_module_granularity_threshold": INTEGER,
            "stage3_use_all_reduce_for_fetch_params": BOOL, "stage3_allgather_sequential": BOOL,
        },
        unprefixed="stage3_",
    ),
    *rows(
        "zero_optimization",
        NO_EFFECT,
        CHECKS,
        {
            "ignore_unused_parameters": BOOL, "log_trace_cache_warnings": BOOL, "enable_sanity_checks": BOOL,
        },
    ),
    Key("zero_optimization.compute_grad_norm", BOOL, NO_EFFECT, why="the norm is computed when it is needed"),
    Key(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        BOOL,
        NO_EFFECT,
        quiet=(False,),
        why="full weights can always be saved",
        aliases=(
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
    ),
    *rows(
        "zero_optimization.leaf_module",
        NO_EFFECT,
        "the modules gathered together are chosen by units= of shardwise.shard",
        {"classes": STRINGS, "names": STRINGS, "name_suffixes": STRINGS},
    ),
    *rows(
        "zero_optimization",
        LATER,
        "remove it, parameters and gradients travel in precision.param and precision.wire",
        {
            "zero_quantized_weights": BOOL, "zero_quantized_nontrainable_weights": BOOL,
            "zero_quantized_gradients": BOOL,
        },
        quiet=(False,),
    ),
    Key("zero_optimization.zero_hpz_partition_size", WHOLE, LATER, quiet=(1,),
        why="remove it, or call shardwise.shard(model, mesh, sharding=shardwise.hybrid(axis)) without the engine"),
    Key("zero_optimization.load_from_fp32_weights", BOOL, LATER, quiet=(True,),
        why="remove it, it changes how DeepSpeed reads checkpoints"),
    Key("zero_optimization.elastic_checkpoint", BOOL, LATER, quiet=(False,),
        why="remove it, it changes how DeepSpeed reads checkpoints"),
    Key("zero_optimization.pipeline_loading_checkpoint", BOOL, LATER, quiet=(False,),
        why="remove it, it changes how DeepSpeed reads checkpoints"),
    Key("zero_optimization.save_muon_momentum_buffer_in_memory", BOOL, LATER, quiet=(False,),
        why="Muon is not here either"),
    Key(
        "zero_optimization.mics_shard_size", ANYTHING, REFUSED,
        why="removed from DeepSpeed; shardwise.shard(model, mesh, sharding=shardwise.hybrid(axis)) does the same",
    ),
    Key("zero_optimization.mics_hierarchical_params_gather", ANYTHING, REFUSED, why="removed from DeepSpeed with MiCS"),
    Key("zero_optimization.zeropp_loco_param", ANYTHING, REFUSED, why="removed from DeepSpeed"),
)

KEYS: Mapping[str, Key] = MappingProxyType(
    {row.name: row for row in (*TOP, *OPTIMIZER, *SCHEDULER, *PRECISION, *ZERO, *MORE_KEYS)}
)

ALIASES: Mapping[str, str] = MappingProxyType({alias: row.name for row in KEYS.values() for alias in row.aliases})

# What people write instead of the name of a section.
MISSPELLINGS: Mapping[str, str] = MappingProxyType({"comms_config": "comms_logger", "monitor_config": "csv_monitor"})

ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "torch_adam", "adam_w_mode", "fp32_optimizer_states",
        "bias_correction", "set_grad_none", "foreach", "fused")  # fmt: skip

# Lower-case type -> native name, and the parameters that the type has.
OPTIMIZERS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "adam": ("adam", ADAM),
        "adamw": ("adamw", ADAM),
        "adagrad": (
            "adagrad",
            ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "foreach", "fused"),
        ),
        "lion": ("lion", ("lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states")),
        "sgd": ("sgd", ("lr", "momentum", "dampening", "nesterov", "weight_decay", "foreach", "fused")),
    }
)

OPTIMIZERS_REFUSED = ("lamb", "muon", "muadam", "muadamw", "musgd", "onebitadam", "zerooneadam", "onebitlamb")

WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")

SCHEDULERS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "WarmupLR": ("warmup", WARMUP),
        "WarmupDecayLR": ("warmup_decay", ("total_num_steps", *WARMUP)),
        "WarmupCosineLR": (
            "warmup_cosine",
            ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
        ),
        "LRRangeTest": (
            "lr_range_test",
            ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
        ),
        "OneCycle": (
            "one_cycle",
            (
                "cycle_min_lr",
                "cycle_max_lr",
                "decay_lr_rate",
                "cycle_first_step_size",
                "cycle_second_step_size",
                "cycle_first_stair_count",
                "cycle_second_stair_count",
                "decay_step_size",
                "cycle_momentum",
                "cycle_min_mom",
                "cycle_max_mom",
                "decay_mom_rate",
            ),
        ),
    }
)
