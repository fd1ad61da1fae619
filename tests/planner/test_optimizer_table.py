"""What each optimizer keeps after a step is what its formula says, and what docs/optimizers-memory.md shows."""

import inspect
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise
from shardwise import ConfigError
from shardwise.optim.families import check_elementwise
from shardwise.optim.lion import Lion
from shardwise.planner.optimizers import state_words

ROOT = Path(__file__).parents[2]
SCRIPT = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "optimizer_table")))
DOCUMENT = (ROOT / "docs" / "optimizers-memory.md").read_text()
TABLE = DOCUMENT.partition(SCRIPT.BEGIN)[2].partition(SCRIPT.END)[0].lstrip("\n")
ROWS = TABLE.partition("\n\n")[0].splitlines()[2:]

Variant = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
TORCH_OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def accepts(kind: type[torch.optim.Optimizer]) -> bool:
    try:
        check_elementwise(kind)
    except ConfigError:
        return False
    return True


ACCEPTED = [*filter(accepts, TORCH_OPTIMIZERS), Lion]


def title(variant: Variant) -> str:
    kind, options = variant
    return "-".join([kind.__name__, *(key for key in options if key != "lr")])


@pytest.mark.parametrize("variant", SCRIPT.VARIANTS, ids=title)
def test_each_rank_keeps_what_is_planned_and_shown(variant: Variant) -> None:
    kind, options = variant
    runs = SCRIPT.measure_all(kind, options)
    assert SCRIPT.row(kind, options, runs) in ROWS, "run scripts/optimizer_table"
    words = state_words(kind.__name__, options)
    for (stage, name), ranks in runs.items():
        precision = SCRIPT.PRECISIONS[name]
        planned = shardwise.plan(
            SCRIPT.model(),
            SCRIPT.NUM_RANKS,
            stage=stage,
            units=[],
            align=1,
            precision=precision,
            optimizer=kind,
            optimizer_options=options,
        )
        for rank, found in enumerate(ranks):
            assert found.element_bytes == planned.of_rank(rank)["optim"]
            assert found.element_bytes == words * found.numel * (precision.master or torch.float32).itemsize
            assert found.all_bytes == sum(planned.of_rank(rank).values())
            assert len(found.names) == words
        copies = SCRIPT.NUM_RANKS if stage == 0 else 1
        assert sum(found.numel for found in ranks) == copies * SCRIPT.NUM_PARAMS


def test_document_has_the_table_that_the_script_writes() -> None:
    assert SCRIPT.table(ROWS) == TABLE
    assert len(ROWS) == len(SCRIPT.VARIANTS)


def test_every_optimizer_of_torch_is_shown_or_refused() -> None:
    assert {kind for kind, _ in SCRIPT.VARIANTS} == set(ACCEPTED)
    assert {name for name, _ in SCRIPT.refused()} == {kind.__name__ for kind in TORCH_OPTIMIZERS if not accepts(kind)}


# Devices only, where it moves counters and adds nothing.
NOT_ON_CPU = {"capturable"}


@pytest.mark.parametrize("kind", ACCEPTED, ids=lambda kind: kind.__name__)
def test_no_other_option_adds_state(kind: type[torch.optim.Optimizer]) -> None:
    switches: dict[str, Any] = {
        name: 0.9 if name == "momentum" else True
        for name, parameter in inspect.signature(kind).parameters.items()
        if name == "momentum" or (name not in NOT_ON_CPU and (parameter.default is False or parameter.default is None))
    }
    for name, value in ({"": None} | switches).items():
        options = {name: value} if name else {}
        if name == "nesterov":
            options["momentum"] = 0.9
        param = torch.ones(5, 7)
        param.grad = torch.ones(5, 7)
        optimizer = kind([param], lr=0.1, **options)
        optimizer.step()
        elements = sum(value.numel() for value in optimizer.state[param].values() if value.dim())
        assert elements == state_words(kind.__name__, options) * param.numel(), name
        shown = {frozenset(options) - {"lr"} for shown_kind, options in SCRIPT.VARIANTS if shown_kind is kind}
        if elements != state_words(kind.__name__) * param.numel():
            assert frozenset(options) in shown, f"{name} adds state: it belongs in the table"
