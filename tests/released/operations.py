"""Try many operations on released parameters, one after the other, and report each on a line of its own.

Run by ``test_released.py`` as a process of its own: reading freed memory on a CPU ends the process, or works on
garbage. Before each operation its name is printed, so that the last line names the one that ended it.
"""

import copy
import io
import json
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.comm.base import Mesh
from shardwise.testing.ranks import run_ranks


class Net(nn.Module):
    """Two blocks and layers of several kinds, each a unit, so that everything is released."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv2d(1, 1, 2)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.arange(1.0, param.numel() + 1).view(param.shape) * 0.1 + number)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x + self.embedding(torch.zeros(1, dtype=torch.int64)))
        return x + self.conv(x.view(1, 1, -1, 4)).sum()


def w(model: Net) -> nn.Parameter:
    return model.blocks[0].weight


ONES = torch.ones(4, 4)
OPERATIONS: dict[str, Callable[[Net], Any]] = {
    # Those that ended the process without a guard
    "mul": lambda m: w(m) * 2,
    "rmul": lambda m: 2 * w(m),
    "add": lambda m: w(m) + w(m),
    "radd tensor": lambda m: ONES + w(m),
    "sum": lambda m: w(m).sum(),
    "clone": lambda m: w(m).clone(),
    "copy_ from": lambda m: torch.empty(4, 4).copy_(w(m)),
    "copy_ into": lambda m: w(m).detach().copy_(ONES),
    "copy_ without gradient": lambda m: torch.no_grad()(lambda: w(m).copy_(ONES))(),
    "zero_": lambda m: torch.no_grad()(lambda: w(m).zero_())(),
    "fill_": lambda m: torch.no_grad()(lambda: w(m).fill_(1.0))(),
    "iadd": lambda m: torch.no_grad()(lambda: w(m).__iadd__(1.0))(),
    "setitem": lambda m: torch.no_grad()(lambda: w(m).__setitem__(0, 0.0))(),
    "to dtype": lambda m: w(m).to(torch.float64),
    "double": lambda m: w(m).double(),
    "norm": lambda m: w(m).norm(),
    "vector_norm": lambda m: torch.linalg.vector_norm(w(m)),
    "foreach norm": lambda m: torch._foreach_norm(list(m.parameters())),
    "foreach mul": lambda m: torch._foreach_mul(list(m.parameters()), 2.0),
    "foreach add_": lambda m: torch.no_grad()(lambda: torch._foreach_add_(list(m.parameters()), 2.0))(),
    "equal": lambda m: torch.equal(w(m), ONES),
    "allclose": lambda m: torch.allclose(w(m), ONES),
    "eq": lambda m: w(m) == 1.0,
    "deepcopy": lambda m: copy.deepcopy(w(m)),
    "deepcopy model": copy.deepcopy,
    "copy": lambda m: copy.copy(w(m)),
    "backward of mul": lambda m: (w(m) * ONES).sum().backward(),
    # Those that worked on garbage
    "numpy": lambda m: w(m).detach().numpy(),
    "numpy of parameter": lambda m: w(m).numpy(force=True),
    "asarray": lambda m: np.asarray(w(m)),
    "array of detached": lambda m: np.array(w(m).detach()),
    "pickle": lambda m: pickle.dumps(w(m)),
    "pickle model": pickle.dumps,
    "torch.save": lambda m: torch.save(w(m), io.BytesIO()),
    "torch.save data": lambda m: torch.save(w(m).data, io.BytesIO()),
    "torch.save model": lambda m: torch.save(m, io.BytesIO()),
    "state_dict": lambda m: m.state_dict(),
    "torch.save state_dict": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "state_dict keep_vars": lambda m: torch.save(m.state_dict(keep_vars=True), io.BytesIO()),
    "safetensors": lambda m: safetensors.torch.save({"w": w(m)}),
    "safetensors file": lambda m: safetensors.torch.save_model(
        m, str(Path(tempfile.gettempdir()) / "none.safetensors")
    ),
    "data_ptr": lambda m: w(m).data_ptr(),
    "untyped_storage": lambda m: w(m).untyped_storage(),
    "dlpack": lambda m: w(m).detach().__dlpack__(),
    "from_dlpack": lambda m: torch.from_dlpack(w(m)),
    "data": lambda m: w(m).data,
    "detach": lambda m: w(m).detach(),
    "share_memory_": lambda m: w(m).share_memory_(),
    "all_reduce": lambda m: torch.distributed.all_reduce(w(m)),
    "broadcast": lambda m: torch.distributed.broadcast(w(m), 0),
    # Those that failed without a reason
    "matmul": lambda m: ONES @ w(m),
    "linear": lambda m: F.linear(ONES, w(m)),
    "linear keyword": lambda m: F.linear(input=ONES, weight=w(m), bias=m.blocks[0].bias),
    "embedding": lambda m: F.embedding(torch.tensor([0, 1]), m.embedding.weight),
    "layer norm": lambda m: F.layer_norm(ONES, (4,), weight=m.norm.weight, bias=m.norm.bias),
    "index": lambda m: w(m)[0],
    "index with parameter": lambda m: ONES[:, m.norm.weight > 0],
    "item": lambda m: m.conv.bias.item(),
    "float": lambda m: float(m.conv.bias),
    "bool": lambda m: bool(m.conv.bias),
    "tolist": lambda m: w(m).tolist(),
    "iterate": lambda m: list(w(m)),
    "contains": lambda m: 1.0 in w(m),
    "repr": lambda m: repr(w(m)),
    "print": lambda m: print(w(m), file=io.StringIO()),
    "format": lambda m: f"{m.conv.bias:.3f}",
    "attention": lambda m: F.scaled_dot_product_attention(w(m), w(m), w(m)),
    "conv": lambda m: F.conv2d(ONES.view(1, 1, 4, 4), m.conv.weight, m.conv.bias),
    "fused adam": lambda m: step_with(m, torch.optim.Adam, fused=True),
    "foreach adam": lambda m: step_with(m, torch.optim.Adam, foreach=True),
    "sgd": lambda m: step_with(m, torch.optim.SGD, foreach=False),
    # More
    "cat": lambda m: torch.cat([p.reshape(-1) for p in m.parameters()]),
    "stack": lambda m: torch.stack([m.blocks[0].bias, m.blocks[1].bias]),
    "view": lambda m: w(m).view(-1),
    "transpose": lambda m: w(m).t().contiguous(),
    "einsum": lambda m: torch.einsum("ij,jk->ik", w(m), ONES),
    "where": lambda m: torch.where(w(m) > 0, ONES, ONES),
    "aten": lambda m: torch.ops.aten.mul.Tensor(w(m), ONES),
    "out": lambda m: torch.no_grad()(lambda: torch.mul(ONES, ONES, out=w(m)))(),
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "functional_call": lambda m: F.linear(ONES, dict(m.named_parameters())["blocks.1.weight"]),
    "inference mode": lambda m: torch.inference_mode()(lambda: w(m) + 1)(),
    "no_grad": lambda m: torch.no_grad()(lambda: w(m).max())(),
    "other thread's default device": lambda m: w(m).to("cpu", copy=True),
    "init": lambda m: nn.init.zeros_(w(m)),
    "autograd.grad": lambda m: torch.autograd.grad((w(m) * 2).sum(), w(m)),
    "isfinite": lambda m: w(m).isfinite().all(),
    "set data": lambda m: setattr(w(m), "data", ONES),
    "swap data": lambda m: w(m).data.zero_(),
    "half": lambda m: m.half(),
    "load_state_dict": lambda m: m.load_state_dict({n: torch.zeros(p.shape) for n, p in m.named_parameters()}),
    "assert_close": lambda m: torch.testing.assert_close(w(m), ONES),
    "histogram": lambda m: torch.histc(w(m)),
    "multiply in place by a parameter": lambda m: ONES.clone().mul_(w(m)),
    "list of parameters": lambda m: torch.block_diag(*m.blocks.parameters()),
}


def step_with(model: Net, kind: Any, **options: bool) -> None:
    """Step a plain optimizer with a gradient of its own for one parameter."""
    param = w(model)
    torch._C._TensorBase.grad.__set__(param, torch.ones(4, 4))  # past the guard of .grad
    try:
        kind([param], lr=0.1, **options).step()
    finally:
        torch._C._TensorBase.grad.__set__(param, None)


def try_all(model: Net, state: str, tell: Callable[[str, str, str], None]) -> None:
    for name, operation in OPERATIONS.items():
        tell(state, name, "started")
        try:
            operation(model)
        except Exception as error:
            ours = isinstance(error, shardwise.StateError) or "StateError" in f"{error!r} {error.__cause__!r}"
            named = any(n in str(error) for n, _ in model.named_parameters()) or "sharded model" in str(error)
            tell(state, name, "refused" if (ours or "unsharded" in str(error)) and named else f"{error!r}"[:300])
        else:
            tell(state, name, "went through")


def body(mesh: Mesh) -> None:
    rank = mesh["data"].rank

    def tell(*words: str) -> None:
        if rank == 0:
            sys.stdout.write(json.dumps(words) + "\n")
            sys.stdout.flush()

    model = shardwise.shard(Net(), mesh, stage=3, units=lambda module: not list(module.children()))
    optim = shardwise.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    before = shardwise.full_parameters(model)
    try_all(model, "new", tell)
    model(torch.ones(2, 4)).sum().backward()
    try_all(model, "with gradients", tell)
    optim.step()
    optim.zero_grad()
    try_all(model, "after a step", tell)
    with torch.no_grad():
        model(torch.ones(2, 4))
    try_all(model, "after an evaluation", tell)
    after = shardwise.full_parameters(model)
    plain = Net()
    plain(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.01).step()
    for name, param in plain.named_parameters():
        if not torch.allclose(after[name], param, rtol=1e-5) or torch.equal(before[name], after[name]):
            raise AssertionError(f"the attempts changed the training of {name}")
    tell("end", "training", "unharmed")


if __name__ == "__main__":
    run_ranks(2, body)
