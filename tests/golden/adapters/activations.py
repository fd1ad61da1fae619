"""Activations, recomputation, ZeRO-Infinity's working memory."""

from shardwise.planner.activations import (
    attention_core_ratio,
    block_bytes,
    checkpoint_bytes,
    layer_bytes,
    layers_bytes,
    rule_bytes,
    rule_checkpointed_bytes,
    selective_saving,
    total_bytes,
)
from shardwise.planner.infinity import working_bytes
from shardwise.planner.recompute import Recompute, best_interval, recompute_share, selective_flops_share
from shardwise.planner.shapes import Shape, block_params
from shardwise.planner.states import BOTH_GRADIENTS, state_bytes
from shardwise.planner.ways import Ways

from .registry import Entry, covers, shape

MODELS = {"gpt3": "gpt3-175b", "mtnlg": "korthikanti-530b-105x20480"}
MIB = 2**20


@covers(r"act\.gpt2\.5as_h")
def core_ratio_gpt2(entry: Entry) -> float:
    return attention_core_ratio(shape("gpt2-xl", entry), seq=entry["s"])


@covers(r"ko\.5as_h\.(?P<model>gpt3|mtnlg)")
def core_ratio(entry: Entry, model: str) -> float:
    return attention_core_ratio(shape(MODELS[model], entry), seq=entry["s"])


@covers(r"act\.gpt2\.korthikanti")
def all_layers(entry: Entry) -> float:
    return total_bytes(shape("gpt2-xl", entry), seq=entry["s"], batch=entry["b"])


@covers(r"act\.gpt2\.ckpt_per_layer")
def inputs_of_layers(entry: Entry) -> float:
    return total_bytes(shape("gpt2-xl", entry), seq=entry["s"], batch=entry["b"], recompute=Recompute.FULL)


@covers(r"act\.gpt2\.zero12")
def rule_of_thumb(entry: Entry) -> float:
    return rule_bytes(shape("gpt2-xl", entry), seq=entry["s"], batch=entry["b"])


@covers(r"act\.gpt2\.zero_ckpt")
def rule_of_thumb_checkpointed(entry: Entry) -> float:
    return rule_checkpointed_bytes(shape("gpt2-xl", entry), seq=entry["s"], batch=entry["b"])


@covers(r"act\.pa\.layer")
def one_checkpoint(entry: Entry) -> float:
    model = shape("zero-100b-125x8192", entry)
    return layer_bytes(model, seq=entry["s"], batch=entry["b"], recompute=Recompute.FULL)


@covers(r"act\.pa\.full")
def checkpoints(entry: Entry) -> float:
    return checkpoint_bytes(shape("zero-100b-125x8192", entry), seq=entry["s"], batch=entry["b"])


@covers(r"act\.pa\.part")
def partitioned_checkpoints(entry: Entry) -> float:
    model = shape("zero-100b-125x8192", entry)
    return checkpoint_bytes(model, seq=entry["s"], batch=entry["b"], partition_ranks=entry["t"])


@covers(r"lec18\.ex8\.(full|pa)")
def checkpoints_of_known_layers(entry: Entry) -> float:
    return layers_bytes(entry["layers"], entry["mib"] * MIB, partition_ranks=entry.inputs.get("t", 1))


@covers(r"ko\.selective_saving\.(?P<model>gpt3|mtnlg)")
def saving(entry: Entry, model: str) -> float:
    return selective_saving(shape(MODELS[model], entry), seq=entry["s"])


@covers(r"ko\.selective_flops\.(?P<model>gpt3|mtnlg)")
def extra_flops(entry: Entry, model: str) -> float:
    return selective_flops_share(shape(MODELS[model], entry), seq=entry["s"])


@covers(r"ko\.tab2\.gpt3\.(?P<setting>full|none|tp|tp_sel|tp_sp|tp_sp_sel)")
def table_of_layers(entry: Entry, setting: str) -> float:
    words = setting.split("_")
    recompute = Recompute.FULL if "full" in words else Recompute.SELECTIVE if "sel" in words else Recompute.NONE
    return layer_bytes(
        shape("gpt3-175b", entry),
        seq=entry["s"],
        batch=entry["b"],
        recompute=recompute,
        tensor_ranks=entry["t"] if "tp" in words else 1,
        sequence_parallel="sp" in words,
    )


@covers(r"act\.recompute_overhead\.theory")
def recompute_overhead(entry: Entry) -> float:
    return recompute_share()


@covers(r"lec18\.ex7")
def interval(entry: Entry) -> float:
    return best_interval(entry["n"])


# ZeRO-Infinity, figure 2(a): a host has 16 devices, and 32 samples


def infinity_shape(entry: Entry, size: str) -> Shape:
    return shape(f"zero-infinity-memory-{size.lower()}-{entry['nl']}x{entry['hd']}", entry)


FIGURE = r"zi\.fig2a\.(?P<size>[\d.]+T)"


@covers(rf"{FIGURE}\.params")
def params(entry: Entry, size: str) -> float:
    return block_params(infinity_shape(entry, size))


@covers(rf"{FIGURE}\.states")
def states(entry: Entry, size: str) -> float:
    return state_bytes(block_params(infinity_shape(entry, size)), BOTH_GRADIENTS, Ways()).total


@covers(rf"{FIGURE}\.act")
def activations_of_a_host(entry: Entry, size: str) -> float:
    model = infinity_shape(entry, size)
    return block_bytes(model, seq=entry["seq"], batch=entry["bsz"], num_blocks=model.num_layers)


@covers(rf"{FIGURE}\.ckpt")
def checkpoints_of_a_host(entry: Entry, size: str) -> float:
    return checkpoint_bytes(infinity_shape(entry, size), seq=entry["seq"], batch=entry["bsz"], interval=entry["ci"])


@covers(rf"{FIGURE}\.mswm")
def working_memory(entry: Entry, size: str) -> float:
    return working_bytes(infinity_shape(entry, size))


@covers(rf"{FIGURE}\.awm")
def working_activations(entry: Entry, size: str) -> float:
    assert entry["bsz"] == 32
    return block_bytes(infinity_shape(entry, size), seq=entry["seq"], batch=2, num_blocks=entry["ci"])
