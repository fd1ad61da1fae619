"""Where the order of sums is fixed, results agree to the last bit.

With a plain process on one rank and with integer gradients; with sums made by hand in rank order on any number of
ranks; from run to run; and, for bf16 parameters with fp32 masters, from stage to stage.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise import Precision, Sharding, stage_sharding
from shardwise.testing.compare import (
    EXACT,
    Case,
    MicroBatches,
    Trace,
    assert_equals_plain,
    assert_same_bits,
    train_plain,
    train_sharded,
)
from shardwise.testing.models import ODDITIES, Block
from shardwise.testing.ranks import run_ranks

STAGES = [stage_sharding(stage) for stage in range(4)]
BF16 = Precision(param=torch.bfloat16)


def train_stages(case: Case, num_ranks: int) -> list[list[Trace]]:
    return [run_ranks(num_ranks, lambda mesh: train_sharded(case, mesh, sharding)) for sharding in STAGES]  # noqa: B023


@pytest.mark.parametrize("window", list(MicroBatches), ids=lambda w: w.name)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.matrix), torch.float32])
def test_one_rank_equals_a_plain_process_bit_for_bit(window: MicroBatches, dtype: torch.dtype) -> None:
    case = Case(oddities=ODDITIES, dtype=dtype, micro_batches=window, fused=True)
    plain = train_plain(case, num_micro_batches=window.count)
    for forced in (False, True):
        for ranks in train_stages(replace(case, force_collectives=forced), 1):
            assert_equals_plain(ranks, plain, EXACT)


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "window"),
    [(2, "adamw", MicroBatches.ONE), (3, "sgd", MicroBatches.SUMMED), (4, "adamw", MicroBatches.SUMMED)],
)
def test_integer_gradients_equal_a_plain_process_bit_for_bit(
    num_ranks: int, optimizer: str, window: MicroBatches
) -> None:
    case = Case(oddities=None, dtype=torch.float32, optimizer=optimizer, micro_batches=window, fused=True)
    plain = train_plain(case)
    for ranks in train_stages(case, num_ranks):
        for trace in ranks:  # losses and outputs are sums of other parts than the plain process's
            assert_equals_plain([replace(trace, losses=plain.losses)], plain, EXACT)


def train_by_hand(case: Case, num_ranks: int, *, reduce_each: bool) -> Trace:
    """Train as the design says ranks do, in plain torch: rounded to the wire, added in rank order in fp32, divided.

    Without clipping, for parameters of one dtype. Masters are fp32; ``reduce_each`` reduces every micro-batch alone.
    One rank sends nothing and rounds nothing, unless its collectives are forced.
    """
    model = case.make_model().to(case.precision.param or case.dtype)
    masters = {name: p.detach().float() for name, p in case.make_model().named_parameters()}
    fragments = {name: torch.nn.Parameter(value.clone()) for name, value in masters.items()}
    optimizer = torch.optim.AdamW(fragments.values(), lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, fused=True)
    count = case.micro_batches.count
    for step in range(case.num_steps):
        x, y = case.batch(step)
        local: list[list[dict[str, Tensor]]] = []  # rank, micro-batch
        for own in zip(x.chunk(num_ranks), y.chunk(num_ranks), strict=True):
            local.append([])
            for part in zip(own[0].chunk(count), own[1].chunk(count), strict=True):
                model.zero_grad()
                (case.loss(model(part[0]), part[1]) / count).backward()
                local[-1].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        for name, fragment in fragments.items():
            wire = model.get_parameter(name).dtype if num_ranks > 1 or case.force_collectives else torch.float32
            fragment.grad = _mean([[grads.get(name) for grads in rank] for rank in local], wire, reduce_each)
        gradients = {name: f.grad.clone() for name, f in fragments.items() if f.grad is not None}
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(fragments[name])
    state = {
        f"{n}/{key}": v for n, f in fragments.items() for key, v in optimizer.state.get(f, {}).items() if f.numel()
    }
    return Trace(
        losses=(),
        norms=(),
        gradients=gradients,
        parameters={name: f.detach() for name, f in fragments.items()},
        optimizer_state=state,
        outputs=model(case.batch(99)[0]).detach(),
    )


def _mean(ranks: list[list[Tensor | None]], wire: torch.dtype, reduce_each: bool) -> Tensor | None:
    """Return the mean over ranks of the sum over micro-batches; a gradient that a rank has not is zero."""
    shapes = [grad.shape for rank in ranks for grad in rank if grad is not None]
    if not shapes:
        return None
    count = len(ranks[0])
    result = torch.zeros(shapes[0])
    for window in [[number] for number in range(count)] if reduce_each else [list(range(count))]:
        total = torch.zeros(shapes[0])
        for rank in ranks:
            own = torch.zeros(shapes[0])
            for number in window:
                grad = rank[number]
                own += 0 if grad is None else grad.float()
            total += own.to(wire).float()
        result += total / len(ranks)
    return result


BY_HAND = [
    pytest.param(
        num_ranks,
        param,
        window,
        id=f"{num_ranks}-{str(param).removeprefix('torch.')}-{window.name}",
        marks=[] if num_ranks in (1, 3) and window.count == 2 and param == torch.bfloat16 else [pytest.mark.matrix],
    )
    for num_ranks in (1, 2, 3, 4)
    for param in (torch.float32, torch.bfloat16)
    for window in MicroBatches
]


@pytest.mark.parametrize(("num_ranks", "param", "window"), BY_HAND)
def test_ranks_add_in_rank_order_bit_for_bit(num_ranks: int, param: torch.dtype, window: MicroBatches) -> None:
    case = Case(
        oddities=("uneven", "unused"),
        dtype=torch.float32,
        precision=Precision(param=param),
        micro_batches=window,
        data_dtype=param,
    )
    for forced in (False, True) if num_ranks == 1 else (False,):
        run = replace(case, force_collectives=forced)
        for stage, ranks in enumerate(train_stages(run, num_ranks)):
            # Without an axis nothing can be summed before the window ends.
            sums = window is MicroBatches.SUMMED and stage >= 2 and (num_ranks > 1 or forced)
            expected = train_by_hand(run, num_ranks, reduce_each=sums or window is MicroBatches.REDUCED)
            for trace in ranks:
                assert_equals_plain([replace(trace, losses=())], expected, EXACT, f"stage {stage}")


@pytest.mark.parametrize("window", list(MicroBatches), ids=lambda w: w.name)
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.matrix), 3])
def test_stages_agree_bit_for_bit_with_bf16_parameters_and_fp32_masters(num_ranks: int, window: MicroBatches) -> None:
    case = Case(
        oddities=("uneven", "tied", "frozen", "unused"),
        dtype=torch.float32,
        data_dtype=torch.bfloat16,
        precision=BF16,
        micro_batches=window,
        max_norm=1.0,
    )
    found = train_stages(case, num_ranks)
    first = found[0][0]
    assert min(first.norms) > 2.0
    weight = first.parameters["blocks.1.down.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())
    assert first.outputs.dtype == torch.bfloat16
    assert_same_bits(found[1], found[0], "stages 0 and 1")
    assert_same_bits(found[3], found[2], "stages 2 and 3")
    if window is not MicroBatches.SUMMED:
        assert_same_bits(found[2], found[0], "stages 0 and 2")


@pytest.mark.parametrize("sharding", STAGES, ids=["stage0", "stage1", "stage2", "stage3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_repeat_bit_for_bit(sharding: object, dtype: torch.dtype) -> None:
    assert isinstance(sharding, type(STAGES[0]))
    case = Case(
        oddities=ODDITIES if dtype == torch.float32 else ("uneven", "tied", "frozen"),
        dtype=torch.float32,
        data_dtype=dtype,
        precision=BF16 if dtype == torch.bfloat16 else Precision(),
        micro_batches=MicroBatches.SUMMED,
        max_norm=1.0,
    )
    first, *others = (run_ranks(3, lambda mesh: train_sharded(case, mesh, sharding)) for _ in range(2))
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize(
    "units", [[], ["blocks.1"], Block, (Block, nn.Linear)], ids=["root", "one", "blocks", "nested"]
)
def test_choice_of_units_changes_no_bit(units: object) -> None:
    # Without clipping: the norm adds slices in the order of the layout, which units decide.
    case = Case(oddities=("uneven", "tied", "frozen"), dtype=torch.float32, micro_batches=MicroBatches.REDUCED)
    expected = run_ranks(3, lambda mesh: train_sharded(case, mesh, STAGES[3]))
    for keep in (False, True):
        found = run_ranks(3, lambda mesh: train_sharded(case, mesh, STAGES[3], units=units, keep_last_unit=keep))  # noqa: B023
        assert_same_bits(found, expected)


@pytest.mark.parametrize("window", [MicroBatches.ONE, MicroBatches.REDUCED], ids=lambda w: w.name)
def test_stages_mixed_in_one_model_change_no_bit(window: MicroBatches) -> None:
    case = Case(oddities=ODDITIES, dtype=torch.float32, micro_batches=window)
    names = sorted(name for name, _ in case.make_model().named_parameters())

    def mixed(name: str, param: nn.Parameter) -> Sharding | None:
        return [*STAGES, None][names.index(name) % 5]

    expected = run_ranks(3, lambda mesh: train_sharded(case, mesh, STAGES[0]))
    assert_same_bits(run_ranks(3, lambda mesh: train_sharded(case, mesh, mixed)), expected)
