"""Fine-tuning: few trainable parameters beside a base that is frozen, and perhaps quantized.

May import the rest of ``planner``. ``shapes.py`` counts the base.
"""

from collections.abc import Sequence

from shardwise.errors import ConfigError
from shardwise.planner.shapes import Shape
from shardwise.planner.states import Accounting, state_bytes, weight_bytes
from shardwise.planner.ways import Ways

__all__ = ["finetune_bytes", "lora_params", "trainable_share"]


def lora_params(shape: Shape, *, rank: int, targets: Sequence[str] = ("query", "value")) -> int:
    """Return the number of trainable parameters of low-rank adapters.

    Args:
        shape: of the base.
        rank: r, of the adapters.
        targets: matrices of a layer that get one: query, key, value, output, up, down, and gate if it has one.

    Raises:
        ConfigError: a target is not one of these.

    Source: LoRA, arXiv:2106.09685, section 4.1: r (d + k) for a d x k matrix.
    """
    sides = {
        "query": shape.hidden + shape.hidden,
        "key": shape.hidden + shape.kv_hidden,
        "value": shape.hidden + shape.kv_hidden,
        "output": shape.hidden + shape.hidden,
        "up": shape.hidden + shape.ffn_hidden,
        "down": shape.ffn_hidden + shape.hidden,
    }
    if shape.gated:
        sides["gate"] = sides["up"]
    unknown = sorted(set(targets) - set(sides))
    if unknown:
        raise ConfigError(f"lora: no matrix is called {unknown}; the matrices of a layer are {list(sides)}")
    return shape.num_layers * sum(rank * sides[target] for target in targets)


def finetune_bytes(
    base_params: float, trainable_params: float, accounting: Accounting, ways: Ways, *, base_bits: float = 16
) -> float:
    """Return the bytes on one rank: the frozen base's weights, and all states of what trains.

    Args:
        base_params: frozen; cut like P, with neither gradients nor optimizer state.
        trainable_params: adapters, or the layers that are not frozen.
        accounting: bytes per trainable parameter.
        ways: slices of each state.
        base_bits: per weight of the base: 16, or 8 and 4 if it is quantized.

    Source: CMU 11-868, lecture 18, section 5.4 and exercise 12; QLoRA, arXiv:2305.14314.
    """
    base = weight_bytes(base_params, bits=base_bits) / ways.param
    return base + state_bytes(trainable_params, accounting, ways).total


def trainable_share(trainable_params: float, base_params: float) -> float:
    """Return the trainable parameters as a part of the base's."""
    return trainable_params / base_params
