"""States outside the device, bandwidths, machines, defaults of other engines."""

from typing import Any

from shardwise.planner.compute import compute_seconds, train_flops
from shardwise.planner.defaults import BUCKET_DEFAULTS, QUANTIZATION_DEFAULTS
from shardwise.planner.hardware import DGX2, Cluster, Range
from shardwise.planner.infinity import checkpoint_intensity, efficiency, optimizer_intensity, param_intensity
from shardwise.planner.offload import (
    PARTITIONS,
    Tier,
    device_reduction,
    link_bytes,
    link_seconds,
    optimizer_seconds,
    tier_bytes,
    tokens_to_hide,
)
from shardwise.planner.rates import aggregate_rate
from shardwise.planner.shapes import Shape
from shardwise.planner.states import HALF_GRADIENTS
from shardwise.planner.ways import Ways

from .registry import Entry, covers

CHOSEN = PARTITIONS["gradients-and-update"]
ROWS = {"base": "none", "g16cpu": "gradients", "updcpu": "update", "chosen": "gradients-and-update"}
GB, TB = 1e9, 1e12


@covers(r"zo\.tab1\.(?P<row>base|g16cpu|updcpu|chosen)")
def reduction(entry: Entry, row: str) -> float:
    tiers = PARTITIONS[ROWS[row]]
    assert tier_bytes(1, HALF_GRADIENTS, Ways(), tiers)[Tier.DEVICE] == entry["gpu_bytes"]
    return device_reduction(tiers)


@covers(r"zo\.gpu_bytes\.13b")
def bytes_on_device(entry: Entry) -> float:
    return tier_bytes(entry["psi"], HALF_GRADIENTS, Ways(), CHOSEN)[Tier.DEVICE]


@covers(r"zo\.cpu_bytes\.13b")
def bytes_on_host(entry: Entry) -> float:
    return tier_bytes(entry["psi"], HALF_GRADIENTS, Ways(), CHOSEN)[Tier.HOST]


@covers(r"zo\.comm")
def traffic_per_param(entry: Entry) -> float:
    return link_bytes(entry["M"], CHOSEN)


@covers(r"lec18\.ex9\.bytes")
def traffic(entry: Entry) -> float:
    return link_bytes(entry["psi"], CHOSEN)


@covers(r"lec18\.ex9\.pcie_s")
def transfer(entry: Entry) -> float:
    return link_seconds(link_bytes(entry["psi"], CHOSEN), entry["bw"])


@covers(r"lec18\.ex9\.adam_s")
def host_optimizer(entry: Entry) -> float:
    return optimizer_seconds(entry["psi"], entry["rate"])


@covers(r"lec18\.ex9\.compute_s")
def compute(entry: Entry) -> float:
    work = train_flops(entry["psi"], entry["tok"])
    return compute_seconds(work, peak_flops=entry["peak"], utilization=entry["mfu"])


@covers(r"lec18\.hide_tokens")
def tokens(entry: Entry) -> float:
    return tokens_to_hide(
        CHOSEN,
        bytes_per_second=entry["bw"],
        params_per_second=entry["rate"],
        peak_flops=entry["peak"],
        utilization=entry["mfu"],
    )


# ZeRO-Infinity


@covers(r"zi\.ait\.params")
def intensity_of_params(entry: Entry) -> float:
    return param_intensity(seq=entry["seq"], batch=entry["bsz"])


@covers(r"zi\.ait\.opt")
def intensity_of_optimizer(entry: Entry) -> float:
    return optimizer_intensity(seq=entry["seq"], batch=entry["bsz"])


@covers(r"zi\.ait\.act")
def intensity_of_checkpoints(entry: Entry) -> float:
    return checkpoint_intensity(Shape(num_layers=1, hidden=entry["hd"]), interval=entry["ci"])


@covers(r"zi\.eff\..+")
def efficiency_at_bandwidth(entry: Entry) -> float:
    return efficiency(entry["ait"], bytes_per_second=entry["bw"], peak_flops=entry["peak"])


@covers(r"zi\.tab3\..+")
def slow_memory(entry: Entry) -> float:
    return aggregate_rate(entry["slow_GBps"] * GB, entry["devices"])


# Machines and defaults


def spread(numbers: Range | None) -> str | None:
    return None if numbers is None else f"{numbers.low / GB:g}-{numbers.high / GB:g}"


@covers(r"zi\.fig2b\..+")
def cluster(entry: Entry) -> dict[str, Any]:
    found = Cluster(host=DGX2, num_hosts=entry["nodes"], num_devices=entry["gpus"])
    return {
        "gpu_mem_TB": found.device_memory_bytes / TB,
        "cpu_mem_TB": found.host_memory_bytes / TB,
        "nvme_TB": found.disk_bytes / TB,
        "gpu_gpu_GBps": spread(found.device_link),
        "cpu_bw_per_gpu_GBps": found.host_bandwidth / GB,
        "nvme_bw_per_gpu_GBps": found.disk_bandwidth / GB,
        "gpu_mem_bw_GBps": spread(DGX2.device_memory_bandwidth),
    }


@covers(r"zo\.hw")
def host(entry: Entry) -> dict[str, Any]:
    return {
        "gpus": f"{DGX2.num_devices}x {DGX2.device.name}",
        "cpu": DGX2.processors,
        "cpu_mem": DGX2.memory,
        "pcie": f"bidirectional {DGX2.link_bandwidth / GB:g} GB/s (printed 'GBps')",
    }


@covers(r"hw\.dgx2\.(?P<link>ib_edr_link|internode|nvswitch_link)")
def link(entry: Entry, link: str) -> float:
    links = {
        "ib_edr_link": DGX2.network_link_bandwidth,
        "internode": DGX2.network_bits,
        "nvswitch_link": DGX2.switch_bandwidth,
    }
    return links[link]


@covers(r"ds\.default\.(stage3_)?(?P<name>\w+)")
def default(entry: Entry, name: str) -> float:
    return float(getattr(BUCKET_DEFAULTS, name))


@covers(r"zpp\.qgz\.bits")
def bits_of_gradients(entry: Entry) -> float:
    return QUANTIZATION_DEFAULTS.grad_bits


@covers(r"zpp\.qwz\.group")
def group_of_weights(entry: Entry) -> float:
    return QUANTIZATION_DEFAULTS.weight_group
