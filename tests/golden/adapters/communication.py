"""Elements and bytes that ranks send, and how tensors lie on them."""

from shardwise.planner.balance import greedy_loads, imbalance, shard_numel
from shardwise.planner.communication import (
    relative_elements,
    step_collectives,
    step_elements,
    step_elements_with_all_reduce,
)
from shardwise.planner.crosshost import (
    ZERO_PLUS_PLUS,
    all_to_all_bytes,
    cross_host_elements,
    cross_host_traffic,
    hybrid_cross_host_elements,
    traffic_reduction,
)
from shardwise.planner.parallel import bubble_share, partitioned_activation_share, tensor_parallel_elements
from shardwise.planner.shapes import mlp_params, mlp_tensors

from .registry import SPLIT, Entry, covers, shape, ways

RANKS_PER_HOST = 8


@covers(rf"comm\.psi\.{SPLIT}")
def many_ranks(entry: Entry, split: str) -> float:
    return step_elements(entry["psi"], ways(split))


@covers(rf"comm\.exact\.k4\.{SPLIT}")
def per_param(entry: Entry, split: str) -> float:
    return step_elements(1, ways(split, entry["n"]))


@covers(rf"sim\.mlp\.comm\.{SPLIT}")
def lecture_model(entry: Entry, split: str) -> float:
    return step_elements(entry["psi"], ways(split, entry["n"]))


@covers(r"comm\.z1_allreduce")
def optimizer_cut_but_all_reduced(entry: Entry) -> float:
    return step_elements_with_all_reduce(1, ways("os"))


@covers(r"comm\.z3_ratio")
def ratio(entry: Entry) -> float:
    return relative_elements(ways("os_g_p"))


@covers(r"fsdp\.(?P<kind>full|repl)\.crosshost")
def sharded_across_hosts(entry: Entry, kind: str) -> float:
    collectives = step_collectives(entry["M"], ways({"full": "os_g_p", "repl": "dp"}[kind], entry["W"]))
    return cross_host_elements(collectives, ranks_per_host=RANKS_PER_HOST)


@covers(r"fsdp\.hsdp\.crosshost")
def hybrid_across_hosts(entry: Entry) -> float:
    return hybrid_cross_host_elements(entry["M"], num_ranks=entry["W"], ranks_per_host=entry["G"])


@covers(r"mg\.tp_comm")
def tensor_parallel(entry: Entry) -> float:
    model = shape("gpt3-175b", entry)
    return tensor_parallel_elements(model, seq=entry["s"], batch=entry["b"], num_ranks=entry["t"])


@covers(r"zero\.pa\.overhead")
def partitioned_activations(entry: Entry) -> float:
    return partitioned_activation_share()


@covers(r"mg\.bubble")
def bubble(entry: Entry) -> float:
    return bubble_share(entry["p"], entry["m"])


@covers(r"zpp\.comm\.(?P<part>fwd_ag|bwd_ag|rs|total)")
def compressed(entry: Entry, part: str) -> float:
    traffic = cross_host_traffic(1, ZERO_PLUS_PLUS)
    parts = {
        "fwd_ag": traffic.forward_gather,
        "bwd_ag": traffic.backward_gather,
        "rs": traffic.reduce_scatter,
        "total": traffic.total,
    }
    return parts[part]


@covers(r"zpp\.comm\.reduction")
def reduction(entry: Entry) -> float:
    return traffic_reduction(ZERO_PLUS_PLUS)


@covers(r"zpp\.a2a\.1hop")
def one_hop(entry: Entry) -> float:
    return all_to_all_bytes(entry["M"], ranks_per_host=entry["N"], compression_ratio=entry["Zr"], hierarchical=False)


@covers(r"zpp\.a2a\.2hop")
def two_hops(entry: Entry) -> float:
    return all_to_all_bytes(entry["M"], ranks_per_host=RANKS_PER_HOST, compression_ratio=entry["Zr"])


# How tensors lie on ranks


def widths(entry: Entry) -> list[int]:
    return [entry["i"], entry["h"], *[entry["h"]] * entry["mid"], entry["o"]]


@covers(r"(sim\.mlp|pt\.zro)\.params")
def params(entry: Entry) -> float:
    return mlp_params(widths(entry))


@covers(r"sim\.mlp\.largest")
def largest_layer(entry: Entry) -> float:
    return mlp_params([entry["h"], entry["h"]])


@covers(r"sim\.mlp\.partition")
def partition(entry: Entry) -> float:
    return shard_numel(entry["psi"], entry["n"])


@covers(r"pt\.fsdp2\.shard")
def shard(entry: Entry) -> float:
    return shard_numel(entry["tot"], entry["n"])


@covers(r"pt\.zro\.imbalance")
def fullest_over_mean(entry: Entry) -> float:
    return imbalance(entry["m"], entry["tot"], entry["n"])


@covers(r"pt\.zro\.rank0")
def fullest_of_tensors(entry: Entry) -> float:
    loads = greedy_loads(mlp_tensors([64, *[256] * 5, 8]), 4)
    assert loads == entry["loads"]
    return max(loads)


@covers(r"lec18\.ex6\.[ab]")
def fullest(entry: Entry) -> float:
    return max(greedy_loads(entry["sizes"], entry["n"]))
