"""The nets and batches of the equivalence matrix have the oddities they are named after, and ranks see unlike data."""

import pytest
import torch
from torch import Tensor, nn

from shardwise.testing.compare import FP32, FP64, Case, Trace, assert_equals_plain, train_plain
from shardwise.testing.models import ODDITIES, integer_batch, make_integer_net, make_odd_net, odd_batch, odd_loss

KINDS = [*((oddity,) for oddity in ODDITIES), ODDITIES]


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    odd_loss(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_model_is_the_same_every_time_and_up_to_rounding_in_every_dtype() -> None:
    first = dict(make_odd_net(*ODDITIES).named_parameters())
    again = dict(make_odd_net(*ODDITIES).named_parameters())
    narrow = dict(make_odd_net(*ODDITIES, dtype=torch.float32).named_parameters())
    other = dict(make_odd_net(*ODDITIES, seed=1).named_parameters())
    for name, param in first.items():
        assert torch.equal(param, again[name])
        assert torch.equal(param.float(), narrow[name].float())
        assert param.numel() == 0 or not torch.equal(param, other[name])


def test_uneven_model_has_sizes_that_no_rank_count_divides() -> None:
    shapes = {name: tuple(p.shape) for name, p in make_odd_net("uneven").named_parameters()}
    assert shapes["scale"] == ()
    assert shapes["shift"] == (1,)
    assert shapes["nothing"] == (0, 13)
    assert all(shapes["blocks.0.up.weight"][0] % num_ranks for num_ranks in (2, 3, 4))


def test_tied_model_has_one_parameter_under_two_names() -> None:
    model = make_odd_net("tied")
    assert model.entry.weight is model.readout.weight
    assert model.blocks[0].up.weight is model.blocks[2].up.weight
    assert len(list(model.parameters())) == len(list(make_odd_net().parameters())) - 2


def test_frozen_model_has_frozen_and_trainable_parameters_in_one_block() -> None:
    model = make_odd_net("frozen")
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.startswith("blocks.0") for name in trains)
    assert "blocks.1.up.weight" not in trains
    assert "blocks.1.up.bias" in trains
    assert all(name.replace("blocks.2", "blocks.1") for name in trains)


@pytest.mark.parametrize(("dtype", "other"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_mixed_model_has_two_dtypes_in_one_block(dtype: torch.dtype, other: torch.dtype) -> None:
    model = make_odd_net("mixed", dtype=dtype)
    assert {p.dtype for p in model.blocks[1].parameters()} == {dtype, other}
    assert model(odd_batch(0, dtype=dtype)[0]).dtype == dtype


def test_unused_model_uses_a_layer_on_one_rank_then_on_none_then_on_all() -> None:
    model = make_odd_net("unused")
    users = []
    for step in range(3):
        x, y = odd_batch(step)
        shares = zip(x.chunk(8), y.chunk(8), strict=True)  # four ranks, two micro-batches
        users.append(["sometimes.weight" in gradients(model, *share) for share in shares])
    assert users == [[True] + [False] * 7, [False] * 8, [True] * 8]
    assert "spare.weight" not in gradients(model, *odd_batch(2))


def test_reused_model_calls_blocks_more_than_once() -> None:
    model = make_odd_net("reused")
    calls: list[nn.Module] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, *_: calls.append(module))
    model(odd_batch(0)[0])
    assert [calls.count(block) for block in model.blocks] == [3, 2, 1]
    assert model.again is model.blocks[1]


@pytest.mark.parametrize("oddities", KINDS, ids="+".join)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_gradients_differ_between_ranks(oddities: tuple[str, ...], step: int) -> None:
    model = make_odd_net(*oddities)
    x, y = odd_batch(step)
    shares = [gradients(model, *share) for share in zip(x.chunk(4), y.chunk(4), strict=True)]
    for name in set.intersection(*(set(share) for share in shares)):
        for first, second in ((a, b) for a in range(4) for b in range(a)):
            if (one := shares[first][name]).numel():
                assert float((one - shares[second][name]).abs().max()) > 100 * FP32.relative * float(one.abs().max()), (
                    name
                )


def test_integer_net_has_integer_gradients_on_any_share_of_the_rows() -> None:
    model = make_integer_net()
    x, weight = integer_batch(0)
    for count in (1, 2, 3, 4, 8):
        for part, factor in zip(x.chunk(count), weight.chunk(count), strict=True):
            model.zero_grad()
            ((model(part) * factor).sum() / len(part)).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                assert torch.equal(param.grad, param.grad.round()), name
                assert 0 < float(param.grad.abs().max()) < 2**16, name


def shifted(trace: Trace, name: str, relative: float) -> Trace:
    """Return a trace with the largest element of one parameter off by a little."""
    changed = trace.parameters[name].clone()
    changed.view(-1)[int(changed.abs().argmax())] *= 1 + relative
    return Trace(**{**vars(trace), "parameters": {**trace.parameters, name: changed}})


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64), (torch.float32, FP32)])
def test_comparison_sees_one_element_on_one_rank(dtype: torch.dtype, tolerance: object) -> None:
    case = Case(oddities=("uneven",), dtype=dtype)
    assert case.tolerance is tolerance
    plain = train_plain(case)
    assert_equals_plain([plain, shifted(plain, "shift", case.tolerance.relative / 2)], plain, case.tolerance)
    wrong = shifted(plain, "shift", case.tolerance.relative * 2)
    with pytest.raises(AssertionError, match="rank 1 against a plain process: parameters shift is off by"):
        assert_equals_plain([plain, wrong], plain, case.tolerance)


def test_comparison_sees_what_one_side_lacks() -> None:
    plain = train_plain(Case())
    less = Trace(**{**vars(plain), "gradients": {}})
    with pytest.raises(AssertionError, match="only on one side"):
        assert_equals_plain([less], plain, FP64)
    for value in (float("nan"), float("inf")):
        broken = {name: torch.full_like(tensor, value) for name, tensor in plain.parameters.items()}
        with pytest.raises(AssertionError, match="is not finite"):
            assert_equals_plain([Trace(**{**vars(plain), "parameters": broken})], plain, FP64)
