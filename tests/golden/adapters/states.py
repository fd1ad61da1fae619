"""Model states, fine-tuning, the largest model."""

from shardwise.planner.budget import Budget, fused_buffer_bytes, overlap_buffer_bytes
from shardwise.planner.finetune import finetune_bytes, lora_params, trainable_share
from shardwise.planner.shapes import Shape, count_params
from shardwise.planner.states import (
    BOTH_GRADIENTS,
    HALF_GRADIENTS,
    SINGLE_PRECISION,
    bytes_per_param,
    fewest_ranks,
    largest_model,
    peak_param_bytes,
    state_bytes,
    weight_bytes,
)
from shardwise.planner.ways import Ways

from .registry import SPLIT, Entry, accounting, covers, shape, sharding, ways

GB = 1e9


@covers(rf"(zero\.fig1|zero\.tab1\.(7\.5B|128B|1T)|notes\.1b_8|lec18\.ex2)\.{SPLIT}(\.nd\d+)?")
def model_states(entry: Entry, split: str) -> float:
    return state_bytes(entry["psi"], accounting(entry["k"]), ways(split, entry["nd"])).total


@covers(r"13b\.z3_4gpu|gpt3\.z3_128|slides\.7b_4gpu")
def all_states_cut(entry: Entry) -> float:
    return state_bytes(entry["psi"], accounting(entry["k"]), ways("os_g_p", entry["nd"])).total


@covers(rf"acct20\.7p5b_64\.{SPLIT}")
def both_gradients(entry: Entry, split: str) -> float:
    return state_bytes(entry["psi"], BOTH_GRADIENTS, ways(split, entry["nd"])).total


@covers(rf"lora\.7b\.fullft\.{SPLIT}")
def full_fine_tuning(entry: Entry, split: str) -> float:
    assert entry["N"] == count_params(shape("llama-2-7b", entry)).total
    return state_bytes(entry["N"], HALF_GRADIENTS, ways(split, 4)).total


@covers(rf"sim\.mlp\.bytes\.{SPLIT}")
def lecture_model(entry: Entry, split: str) -> float:
    return state_bytes(entry["psi"], HALF_GRADIENTS, ways(split, entry["n"])).total


@covers(r"gpt2\.states|zo\.states\..+|lec18\.ex1\.16B|ultrascale\..+\.16")
def whole_states(entry: Entry) -> float:
    return state_bytes(entry["psi"], HALF_GRADIENTS, Ways()).total


@covers(r"lec18\.ex1\.20B|ultrascale\..+\.20|acct20\.(gpt3_175b|llama3_8b)\.total")
def whole_states_both_gradients(entry: Entry) -> float:
    return state_bytes(entry["psi"], BOTH_GRADIENTS, Ways()).total


@covers(r"acct20\.(gpt3_175b|llama3_8b)\.(?P<kind>params|grads|optimizer)")
def one_kind(entry: Entry, kind: str) -> float:
    states = state_bytes(entry["psi"], BOTH_GRADIENTS, Ways())
    return {"params": states.param, "grads": states.grad, "optimizer": states.optimizer}[kind]


@covers(r"ds\.tutorial\.opt_1p5b(_full)?")
def optimizer_alone(entry: Entry) -> float:
    return state_bytes(entry["psi"], HALF_GRADIENTS, ways("os", entry.inputs.get("nd", 1))).optimizer


@covers(r"gpt2\.fp16|gpt3\.fp16_params|llama70b\.fp16")
def half_precision_weights(entry: Entry) -> float:
    return weight_bytes(entry["psi"])


@covers(r"lora\.7b\.base_fp16")
def half_precision_base(entry: Entry) -> float:
    return weight_bytes(entry["N"])


@covers(r"llama70b\.int4")
def four_bit_weights(entry: Entry) -> float:
    return weight_bytes(entry["psi"], bits=4)


@covers(r"adam\.opt_share")
def optimizer_share(entry: Entry) -> float:
    return accounting(entry["k"]).optimizer_share


@covers(r"fp32adam\.bytes")
def single_precision(entry: Entry) -> float:
    return SINGLE_PRECISION.total


@covers(r"fsdp\.peak_params")
def peak_params(entry: Entry) -> float:
    return peak_param_bytes(
        entry["psi"],
        ways("os_g_p", entry["F"]),
        largest_unit=entry["maxu"],
        rest_bytes=entry["Kfull"],
        gathered_bytes=entry["Klow"],
    )


@covers(r"mg\.ckpt\.1t")
def checkpoint_file(entry: Entry) -> float:
    return bytes_per_param(13.8e12, entry["P"])


@covers(r"notes\.peak_example")
def peak(entry: Entry) -> float:
    return Budget(states=entry["states"] * GB, activations=entry["act_buf"] * GB).peak


@covers(r"buf\.fp32\..+")
def fused_buffer(entry: Entry) -> float:
    return fused_buffer_bytes(entry["psi"])


@covers(r"ds\.overlap_comm_buffers.*")
def overlap_buffers(entry: Entry) -> float:
    return overlap_buffer_bytes(entry["bucket"], entry["bucket"])


# Fine-tuning


@covers(r"lora\.13b\.base")
def base_matrices(entry: Entry) -> float:
    return count_params(shape("llama-2-13b", entry)).matrices


@covers(r"lora\.13b\.per_proj")
def one_adapter(entry: Entry) -> float:
    return lora_params(Shape(num_layers=1, hidden=entry["d"]), rank=entry["r"], targets=["query"])


@covers(r"lora\.(7b|13b)\.trainable")
def adapters(entry: Entry) -> float:
    targets = ("query", "value", "key", "output")[: entry["proj"]]
    return lora_params(Shape(num_layers=entry["L"], hidden=entry["d"]), rank=entry["r"], targets=targets)


@covers(r"lora\.7b\.fraction")
def adapter_share(entry: Entry) -> float:
    return trainable_share(entry["t"], entry["N"])


@covers(r"lora\.13b\.z2_adapter")
def adapter_states(entry: Entry) -> float:
    return state_bytes(entry["t"], HALF_GRADIENTS, ways("os_g", entry["n"])).total


@covers(r"lora\.13b\.z2_total|lora\.7b\.lora_z2")
def adapters_with_replicated_base(entry: Entry) -> float:
    return finetune_bytes(entry["N"], entry["t"], HALF_GRADIENTS, ways("os_g", entry["n"]))


@covers(r"lora\.7b\.lora_z3")
def adapters_with_cut_base(entry: Entry) -> float:
    return finetune_bytes(entry["N"], entry["t"], HALF_GRADIENTS, ways("os_g_p", entry["n"]))


# The largest model


@covers(rf"zero\.tab2\.theory\.mp\d+\.{SPLIT}")
def theoretical_model(entry: Entry, split: str) -> float:
    memory, states = entry["mem"] * GB, accounting(entry["k"])
    return largest_model(memory, states, ways(split, entry["nd"]), num_model_ranks=entry["mp"])


@covers(r"zero\.limit\.(?P<split>os|os_g)\.v100")
def limit_of_many_ranks(entry: Entry, split: str) -> float:
    return largest_model(entry["mem"] * GB, HALF_GRADIENTS, ways(split))


@covers(r"lec18\.ex5\.z2_80GB")
def limit_of_cut_gradients(entry: Entry) -> float:
    return largest_model(entry["mem"] * GB, HALF_GRADIENTS, ways("os_g"))


@covers(r"lec18\.ex5\.z3_80GB_256|zero\.max\.v100\.stage3\.nd1024")
def largest_with_all_cut(entry: Entry) -> float:
    return largest_model(entry["mem"] * GB, HALF_GRADIENTS, ways("os_g_p", entry["nd"]))


@covers(r"zi\.gpus_for_100b")
def ranks_for_states(entry: Entry) -> float:
    fewest = fewest_ranks(entry["P"], entry["mem"], BOTH_GRADIENTS, sharding("os_g_p"))
    assert fewest is not None
    return fewest
