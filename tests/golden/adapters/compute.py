"""Parameters of shapes, FLOPs, utilization, time of training, runs compared."""

from dataclasses import replace

from shardwise.planner.compute import (
    accumulated_scale,
    global_batch,
    megatron_flops,
    num_steps,
    scaled_seconds,
    train_flops,
    train_flops_with_attention,
    training_seconds,
    utilization,
)
from shardwise.planner.rates import (
    aggregate_rate,
    rate_ratio,
    relative_overhead,
    scaling_efficiency,
    speedup,
    time_saved,
)
from shardwise.planner.recompute import Recompute
from shardwise.planner.shape_table import SHAPES
from shardwise.planner.shapes import Shape, block_params, count_params, megatron_params

from .registry import Entry, covers, shape

PAPERS = {"azure": "azure", "zero": "zero", "zo": "zero-offload", "zi": "zero-infinity"}
LARGE = {
    "22B": "korthikanti-22b-48x6144",
    "175B": "korthikanti-175b-96x12288",
    "530B": "korthikanti-530b-105x20480",
    "1T": "korthikanti-1t-128x25600",
}
TERA = 1e12


@covers(r"(?P<paper>azure|zero|zi|zo)\.cfg\.(nomp\.)?(?P<label>[\d.]+[BT])(\.L\d+)?(\.h\d+)?")
def published_shape(entry: Entry, paper: str, label: str) -> float:
    name = f"{PAPERS[paper]}-{label.lower()}-{entry['layers']}x{entry['hidden']}"
    return block_params(shape(name, entry))


@covers(r"mg\.tab1\.params\.(?P<label>.+B)")
def megatron_shape(entry: Entry, label: str) -> float:
    model = shape(f"megatron-{label.lower()}-{entry['l']}x{entry['h']}", entry)
    assert model.positions == entry["s"]
    return megatron_params(model)


@covers(r"(?P<model>gpt2xl|gpt3)\.params")
def gpt(entry: Entry, model: str) -> float:
    found = shape({"gpt2xl": "gpt2-xl", "gpt3": "gpt3-175b"}[model], entry)
    assert found.positions == entry["s"]
    return count_params(found).total


@covers(r"llama(?P<version>[23])\.(?P<size>\d+b)")
def llama(entry: Entry, version: str, size: str) -> float:
    return count_params(shape(f"llama-{version}-{size}", entry)).total


# FLOPs and utilization


@covers(r"flops\.6N")
def flops(entry: Entry) -> float:
    return train_flops(entry["N"], entry["tok"])


@covers(r"flops\.iter\.zi")
def flops_with_recomputation(entry: Entry) -> float:
    params = block_params(Shape(num_layers=entry["nl"], hidden=entry["hd"]))
    return train_flops(params, entry["bsz"] * entry["seq"], recompute=True)


@covers(r"titan\.mfu\.(compile|eager)")
def utilization_with_attention(entry: Entry) -> float:
    model = shape("llama-3-8b", entry)
    assert count_params(model).without_embedding == entry["N"]
    work = train_flops_with_attention(entry["N"], model, seq=entry["s"], tokens=entry["tps"])
    return utilization(work, 1, peak_flops=entry["peak"])


def step_utilization(entry: Entry, model: Shape, recompute: Recompute, peak: float) -> float:
    work = megatron_flops(model, batch=entry["B"], seq=entry["s"], recompute=recompute)
    return utilization(work, entry["t"], num_ranks=entry.inputs.get("n", 1), peak_flops=peak)


@covers(r"ko\.tab5\.mfu\.(?P<size>.+)")
def model_utilization(entry: Entry, size: str) -> float:
    return step_utilization(entry, shape(LARGE[size], entry), Recompute.NONE, entry["peak"])


@covers(r"ko\.530b_dp8\.mfu")
def model_utilization_on_more_ranks(entry: Entry) -> float:
    return step_utilization(entry, shape(LARGE["530B"], entry), Recompute.NONE, entry["peak"])


@covers(r"ko\.tab5\.hfu\.(?P<size>.+)")
def hardware_utilization(entry: Entry, size: str) -> float:
    return step_utilization(entry, shape(LARGE[size], entry), Recompute.SELECTIVE, entry["peak"])


@covers(r"ds\.log\.zero_offload\.10b\.tflops")
def rate_of_offload_log(entry: Entry) -> float:
    model = replace(SHAPES["zero-10b-50x4096"], vocab=entry["V"])
    return step_utilization(entry, model, Recompute.FULL, peak=1)


@covers(r"ds\.log\.zpp18b\.(zero3|zeropp)")
def rate_of_compression_log(entry: Entry) -> float:
    return step_utilization(entry, shape("megatron-18.4b-40x6144", entry), Recompute.FULL, peak=1)


@covers(r"mg\.tab1\.peakfrac\..+")
def share_of_peak(entry: Entry) -> float:
    return utilization(entry["tf"] * TERA, 1, peak_flops=entry["peak"] * TERA)


@covers(r"zero\.text\.peak")
def share_of_peak_of_zero(entry: Entry) -> float:
    return utilization(entry["tf"] * TERA, 1, peak_flops=entry["peak"] * TERA)


@covers(r"mg\.tab1\.aggregate\..+")
def rate_of_all_ranks(entry: Entry) -> float:
    return aggregate_rate(entry["tf"] * TERA, entry["n"])


# Time of training


@covers(r"mg\.tab2\.days\.\w+\.(?P<size>175b|530b)\.\d+")
def days(entry: Entry, size: str) -> float:
    model = shape(LARGE[size.upper()], entry)
    step = megatron_flops(model, batch=entry["B"], seq=entry["s"], recompute=Recompute.FULL)
    steps = num_steps(entry["T"], batch=entry["B"], seq=entry["s"])
    return training_seconds(step, steps, num_ranks=entry["n"], flops_per_second=entry["tf"])


@covers(r"mg\.time\.(175b|1t)")
def days_by_the_short_form(entry: Entry) -> float:
    work = train_flops(entry["P"], entry["T"], recompute=True)
    return training_seconds(work, 1, num_ranks=entry["n"], flops_per_second=entry["X"])


@covers(r"zero\.s9\.bert_scaling")
def days_of_a_larger_model(entry: Entry) -> float:
    return scaled_seconds(entry["minutes"] * 60, entry["factor"])


@covers(r"lec18\.ex11")
def batch(entry: Entry) -> float:
    return global_batch(entry["world"], entry["micro"], entry["acc"])


@covers(r"lec18\.ex11\.double_scale")
def scale_divided_twice(entry: Entry) -> float:
    return accumulated_scale(entry["acc"], divided_by_hand=True)


# Runs compared


@covers(r"ko\.tab4\..+")
def overhead(entry: Entry) -> float:
    return relative_overhead(entry["fwd_ms"], entry["bwd_ms"], base_seconds=entry["base"])


@covers(r"ko\.tab5\.speedup\..+")
def throughput_gain(entry: Entry) -> float:
    return relative_overhead(entry["t0"], base_seconds=entry["t1"])


@covers(r"fsdp\.prefetch")
def saved_by_prefetch(entry: Entry) -> float:
    return time_saved(entry["no_pref"], entry["pref"])


@covers(r"zo\.tab4\..+\.speedup")
def faster_adam(entry: Entry) -> float:
    return speedup(entry["p"], entry["c"])


@covers(r"ds\.log\.zpp18b\.speedup")
def faster_step(entry: Entry) -> float:
    return speedup(entry["a"], entry["b"])


@covers(r"zo\.fig9\..+\.dpu_gain")
def delayed_update(entry: Entry) -> float:
    return rate_ratio(entry["dpu"], entry["no_dpu"])


@covers(r"zero\.superlinear")
def rate_per_rank(entry: Entry) -> float:
    return rate_ratio(entry["t400"], entry["t64"])


@covers(r"zi\.superlinear")
def rate_over_linear(entry: Entry) -> float:
    return scaling_efficiency(entry["p64"], entry["p512"], times_ranks=8)
