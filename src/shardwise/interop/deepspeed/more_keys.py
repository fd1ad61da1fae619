"""Keys of DeepSpeed 0.19.8 beside training itself: offloading, activations, files, monitors, parallelism, removed ones.

Most ask for features that this version does not have: they are accepted as long as they ask for nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.deepspeed.kinds import (
    ANYTHING,
    BOOL,
    COUNT,
    FRACTION,
    INTEGER,
    OBJECT,
    RATE,
    STRINGS,
    TEXT,
    WHOLE,
    Fate,
    Key,
    Kind,
    one_of,
    or_null,
)

__all__ = ["MORE_KEYS", "rows"]


def rows(
    section: str,
    fate: Fate,
    why: str,
    kinds: Mapping[str, Kind],
    *,
    quiet: tuple[Any, ...] = (),
    switch: str = "",
    unprefixed: str = "",
) -> Iterator[Key]:
    """Yield the rows of keys that share a section and a fate; ``unprefixed`` may be left out of their names."""
    for name, kind in kinds.items():
        aliases = (f"{section}.{name.removeprefix(unprefixed)}",) if unprefixed else ()
        yield Key(f"{section}.{name}", kind, fate, why=why, quiet=quiet, switch=switch, aliases=aliases)


def feature(section: str, why: str, tuning: Mapping[str, Kind], *, enabled: str = "enabled") -> Iterator[Key]:
    """Yield the rows of a feature that this version does not have: its switch, and what only tunes it."""
    switch = f"{section}.{enabled}"
    yield Key(switch, BOOL, Fate.LATER, why=why, quiet=(False,))
    yield from rows(section, Fate.LATER, why, tuning, switch=switch)


HOST = "remove it, or train on the CPU, whose state is in host memory"
MORE_RANKS = "take more ranks or a higher stage"
NO_TP = f"instead of tensor parallelism, {MORE_RANKS}"
NVME_ONLY = "only offloading to NVMe would use it"
ACTIVATIONS = "it configures deepspeed.checkpointing, which the model has to call; use torch.utils.checkpoint"
SAVING = "remove it, it changes how DeepSpeed writes checkpoints"
MONITOR = "log the loss, engine.get_lr() and the like yourself"
DEVICE = one_of("none", "cpu", "nvme")

# fmt: off
OFFLOAD = (
    Key("zero_optimization.offload_param.device", DEVICE, Fate.LATER, quiet=("none",), why=HOST),
    *rows(
        "zero_optimization.offload_param",
        Fate.NO_EFFECT,
        "it tunes offloading to NVMe or the host",
        {
            "nvme_path": or_null(TEXT), "pin_memory": BOOL, "buffer_count": WHOLE, "buffer_size": WHOLE,
            "max_in_cpu": WHOLE,
        },
        switch="zero_optimization.offload_param.device",
    ),
    Key("zero_optimization.offload_optimizer.device", DEVICE, Fate.LATER, quiet=("none",), why=HOST),
    *rows(
        "zero_optimization.offload_optimizer",
        Fate.NO_EFFECT,
        "it tunes offloading to NVMe or the host",
        {
            "nvme_path": or_null(TEXT), "pin_memory": BOOL, "buffer_count": WHOLE, "pipeline_read": BOOL,
            "pipeline_write": BOOL, "fast_init": BOOL, "ratio": FRACTION, "super_offload": BOOL,
            "cpuadam_cores_perc": FRACTION,
        },
        switch="zero_optimization.offload_optimizer.device",
    ),
    Key("zero_optimization.cpu_offload", or_null(BOOL), Fate.LATER, quiet=(False, None), why=HOST),
    Key("zero_optimization.cpu_offload_param", or_null(BOOL), Fate.LATER, quiet=(False, None), why=HOST),
    Key("zero_optimization.cpu_offload_use_pin_memory", or_null(BOOL), Fate.NO_EFFECT,
        why="it is deprecated, and tunes offloading to the host"),
    *rows(
        "zero_optimization.zenflow",
        Fate.LATER,
        "remove the section",
        {
            "topk_ratio": FRACTION, "select_strategy": TEXT, "select_interval": ANYTHING, "update_interval": ANYTHING,
            "overlap_step": BOOL, "offload": BOOL, "auto_ratio": FRACTION, "full_warm_up_rounds": WHOLE,
            "pt_reserved_cores_perc": FRACTION, "steps_per_epoch": or_null(COUNT),
        },
    ),
)

ACTIVATION_AND_FILES = (
    *rows(
        "activation_checkpointing",
        Fate.NO_EFFECT,
        ACTIVATIONS,
        {
            "partition_activations": BOOL, "cpu_checkpointing": BOOL, "contiguous_memory_optimization": BOOL,
            "number_checkpoints": or_null(COUNT), "synchronize_checkpoint_boundary": BOOL, "profile": BOOL,
        },
        quiet=(False, None),
    ),
    *rows(
        "aio",
        Fate.NO_EFFECT,
        NVME_ONLY,
        {
            "block_size": COUNT, "queue_depth": COUNT, "intra_op_parallelism": COUNT, "single_submit": BOOL,
            "overlap_events": BOOL, "thread_count": COUNT,
        },
    ),
    Key("aio.use_gds", BOOL, Fate.LATER, quiet=(False,), why=NVME_ONLY),
    Key(
        "checkpoint.tag_validation", one_of("ignore", "warn", "fail"), Fate.NO_EFFECT, why="unlike tags always fail"
    ),
    Key(
        "checkpoint.load_universal", BOOL, Fate.NO_EFFECT, why="every checkpoint loads on any number of ranks here"
    ),
    Key("checkpoint.use_node_local_storage", BOOL, Fate.LATER, quiet=(False,), why=SAVING),
    Key("checkpoint.parallel_write.pipeline_stage", BOOL, Fate.LATER, quiet=(False,), why=SAVING),
    Key("checkpoint.checkpoint_serialization", BOOL, Fate.LATER, quiet=(True,), why=SAVING),
    Key("checkpoint.writer.type", TEXT, Fate.LATER, quiet=("fast",), why=SAVING),
    Key("checkpoint.writer.io_buffer_size", COUNT, Fate.LATER, quiet=(64 << 20,), why=SAVING),
    Key("checkpoint.writer.io_buffer_double", BOOL, Fate.LATER, quiet=(True,), why=SAVING),
    Key("checkpoint.writer.io_multiplier", COUNT, Fate.LATER, quiet=(1,), why=SAVING),
    Key("checkpoint.writer.show_statistics", BOOL, Fate.LATER, quiet=(False,), why=SAVING),
    Key("checkpoint.writer.data_parallel", or_null(TEXT), Fate.LATER, quiet=(None,), why=SAVING),
    Key("checkpoint.writer.decoupled", BOOL, Fate.LATER, quiet=(False,), why=SAVING),
    Key("datastates_ckpt", ANYTHING, Fate.LATER, quiet=(None, False), why=SAVING),
)

OBSERVING = (
    *feature(
        "flops_profiler",
        "use torch.profiler",
        {
            "recompute_fwd_factor": RATE, "profile_step": COUNT, "module_depth": INTEGER, "top_modules": COUNT,
            "detailed": BOOL, "output_file": or_null(TEXT),
        },
    ),
    *feature(
        "comms_logger",
        "use shardwise.comm.recording.record to count collectives and bytes",
        {
            "verbose": BOOL, "prof_all": BOOL, "debug": BOOL, "prof_ops": STRINGS,
        },
    ),
    *feature("tensorboard", MONITOR, {"output_path": TEXT, "job_name": TEXT}),
    *feature("wandb", MONITOR, {"group": or_null(TEXT), "team": or_null(TEXT), "project": TEXT}),
    *feature("csv_monitor", MONITOR, {"output_path": TEXT, "job_name": TEXT}),
    *feature(
        "comet",
        MONITOR,
        {
            "samples_log_interval": COUNT, "project": or_null(TEXT), "workspace": or_null(TEXT),
            "api_key": or_null(TEXT), "experiment_name": or_null(TEXT), "experiment_key": or_null(TEXT),
            "online": or_null(BOOL), "mode": or_null(TEXT),
        },
    ),
)

COMPILE = feature(
    "compile",
    "compile the model yourself, with torch.compile",
    {
        "free_activation": BOOL, "free_activation_threshold": WHOLE, "offload_activation": BOOL,
        "offload_activation_pin_memory": BOOL, "offload_opt_states": BOOL, "offload_parameters": BOOL,
        "double_buffer": BOOL, "symmetric_memory": BOOL, "sync_before_reduce": BOOL, "sync_after_reduce": BOOL,
        "sync_before_allgather": BOOL, "sync_after_allgather": BOOL, "keep_int_input_tensors": BOOL,
        "keep_all_input_tensors": BOOL, "debug_log": BOOL, "passes": or_null(STRINGS), "autoep_non_moe": BOOL,
    },
    enabled="deepcompile",
)

TENSOR_PARALLEL = (
    Key("tensor_parallel.autotp_size", WHOLE, Fate.LATER, quiet=(0, 1), why=NO_TP),
    Key("tensor_parallel.tp.tp_size", COUNT, Fate.LATER, quiet=(1,), why=NO_TP),
    *rows(
        "tensor_parallel",
        Fate.LATER,
        "it tunes tensor parallelism",
        {
            "tp.tp_grain_size": COUNT, "tp_overlap_comm": BOOL, "preset_model": or_null(TEXT),
            "partition_config": or_null(OBJECT), "injection_policy_tuple": or_null(STRINGS),
            "vocab_parallel_lm_head": or_null(BOOL), "vocab_parallel_ce_backend": one_of("torch", "liger"),
            "keep_module_on_host": BOOL, "dtype": TEXT,
            "replace_with_kernel_inject": BOOL, "kernel_inject": BOOL,
        },
        switch="tensor_parallel.autotp_size",
    ),
)

PARALLEL = (
    *COMPILE,
    *TENSOR_PARALLEL,
    *feature(
        "expert_parallel",
        "experts are sharded as all modules are",
        {
            "autoep_size": COUNT, "expert_tensor_parallel_size": COUNT, "use_grouped_mm": BOOL, "comm_backend": TEXT,
            "async_split_plan": BOOL, "preset_model": or_null(TEXT),
        },
    ),
    Key("pipeline.stages", ANYTHING, Fate.LATER, quiet=("auto", 1), why=f"instead of a pipeline, {MORE_RANKS}"),
    *rows(
        "pipeline",
        Fate.LATER,
        "it tunes pipeline parallelism",
        {
            "partition": TEXT, "seed_layers": BOOL, "activation_checkpoint_interval": WHOLE, "pipe_partitioned": BOOL,
            "grad_partitioned": BOOL,
        },
        switch="pipeline.stages",
    ),
    *feature(
        "hybrid_engine",
        "generate with the model itself, inside shardwise.unsharded",
        {
            "max_out_tokens": COUNT, "inference_tp_size": COUNT, "release_inference_cache": BOOL,
            "pin_parameters": BOOL, "tp_gather_partition_size": COUNT, "enable_cuda_graph": BOOL,
        },
    ),
    *feature(
        "autotuning",
        "shardwise.plan tells the memory of each stage",
        {
            "fast": BOOL, "results_dir": TEXT, "exps_dir": TEXT, "overwrite": BOOL, "start_profile_step": COUNT,
            "end_profile_step": COUNT, "metric": TEXT, "tuner_type": TEXT, "tuner_early_stopping": COUNT,
            "tuner_num_trials": COUNT, "max_train_batch_size": or_null(COUNT), "min_train_batch_size": COUNT,
            "max_train_micro_batch_size_per_gpu": COUNT, "min_train_micro_batch_size_per_gpu": COUNT,
            "num_tuning_micro_batch_sizes": COUNT, "mp_size": COUNT, "arg_mappings": or_null(OBJECT),
            "model_info": or_null(OBJECT),
        },
    ),
    *feature(
        "data_efficiency",
        "sample and route in the data loader and in the model",
        {
            "seed": WHOLE, "data_sampling": OBJECT, "data_routing": OBJECT,
        },
    ),
    Key("weight_quantization", OBJECT, Fate.REFUSED, why="it is for inference"),
)

GONE = "removed from DeepSpeed, which stops at it"

REMOVED = (
    Key("elasticity", ANYTHING, Fate.REFUSED, why=f"{GONE}; give the batch numbers"),
    Key("nebula", ANYTHING, Fate.REFUSED, why=GONE),
    Key("amp", ANYTHING, Fate.REFUSED, why=f"{GONE}; use bf16 or fp16"),
    Key("compression_training", ANYTHING, Fate.REFUSED, why=GONE),
    Key("quantize_training", ANYTHING, Fate.REFUSED, why=GONE),
    Key("sparse_attention", ANYTHING, Fate.REFUSED, why=f"{GONE}; it belongs to the model"),
    Key("sparse_gradients", ANYTHING, Fate.REFUSED, why=GONE),
    Key("eigenvalue", ANYTHING, Fate.REFUSED, why=GONE),
    Key("curriculum_learning", ANYTHING, Fate.REFUSED, why=f"{GONE}; order the samples in the data loader"),
    Key("progressive_layer_drop", ANYTHING, Fate.REFUSED, why=f"{GONE}; it belongs to the model"),
    Key("graph_harvesting", ANYTHING, Fate.REFUSED, why=GONE),
)

MORE_KEYS: tuple[Key, ...] = (*OFFLOAD, *ACTIVATION_AND_FILES, *OBSERVING, *PARALLEL, *REMOVED)
