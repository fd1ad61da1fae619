"""Random constructors: whatever is done to a pool of tensors, the recording gives the bits of ordinary construction."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.initial import replay

from .zoo import differences

FAST = 100
WIDTH = 5


@pytest.fixture(autouse=True)
def _same_generator_afterwards() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


class Program:
    """A seeded sequence of operations over a pool of square matrices and views of them; run twice, it does the same."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.pool: list[Tensor] = [torch.randn(WIDTH, WIDTH)]
        self.states: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(seed)
        self.net = nn.Module()
        self.numbers: list[float] = []

    def run(self, num_steps: int) -> nn.Module:
        acts: list[Callable[[], object]] = [
            self.make,
            self.view,
            self.overwrite,
            self.overwrite,
            self.edit,
            self.edit,
            self.combine,
            self.copy,
            self.seed,
            self.ask,
            self.keep,
            self.swap_data,
        ]
        with torch.no_grad():
            for _ in range(num_steps):
                self.choice.choice(acts)()
            for _ in range(4):
                self.keep()
        self.net.numbers = torch.tensor(self.numbers)
        return self.net

    def any(self) -> Tensor:
        return self.choice.choice(self.pool)

    def source(self) -> torch.Generator | None:
        return self.choice.choice([None, None, self.generator])

    def make(self) -> None:
        kind = self.choice.randrange(6)
        size = (WIDTH, WIDTH)
        made = [
            lambda: torch.randn(size, generator=self.source()),
            lambda: torch.rand(size).t(),
            lambda: torch.zeros(size),
            lambda: torch.bernoulli(torch.full(size, 0.5)),
            lambda: torch.empty(2 * WIDTH, WIDTH).uniform_()[::2],
            lambda: torch.rand_like(self.any()),
        ]
        self.pool.append(made[kind]())

    def view(self) -> None:
        x = self.any()
        self.pool.append(self.choice.choice([x.t(), x.detach(), x.view(x.shape), x.data]))

    def overwrite(self) -> None:
        x, generator = self.part(), self.source()
        kind = self.choice.randrange(5)
        if kind == 0:
            x.normal_(generator=generator)
        elif kind == 1:
            x.uniform_(-1, 1, generator=generator)
        elif kind == 2:
            x.zero_()
        elif kind == 3:
            nn.init.trunc_normal_(x, std=0.5)
        else:
            x.fill_(self.choice.random())

    def part(self) -> Tensor:
        x = self.any()
        row = self.choice.randrange(WIDTH)
        return self.choice.choice([x, x, x, x[row], x[:, row], x[1:3], x[row : row + 1, 1:], x.diagonal()])

    def edit(self) -> None:
        x, y = self.any(), self.any()
        kind = self.choice.randrange(7)
        if kind == 0:
            x.add_(y.clone(), alpha=0.5)
        elif kind == 1:
            x.mul_(0.5)
        elif kind == 2:
            x.copy_(torch.rand(WIDTH, WIDTH) if self.choice.random() < 0.5 else y.clone())
        elif kind == 3:
            x[self.choice.randrange(WIDTH)] = y[0].clone()
        elif kind == 4:
            x[x > 0.5] = 0.25
        elif kind == 5:
            torch.add(x.clone(), y.clone(), out=self.pool[0]).clamp_(-3, 3)
        else:
            nn.functional.dropout(x, 0.5, inplace=True)

    def combine(self) -> None:
        x, y = self.any(), self.any()
        made = self.choice.choice([lambda: x + y, lambda: torch.where(x > y, x, y), lambda: torch.normal(x, y.abs())])
        self.pool.append(made().clamp(-3, 3))

    def copy(self) -> None:
        self.pool.append(self.choice.choice([self.any().clone(), self.any().double().float(), self.any().contiguous()]))

    def seed(self) -> None:
        kind = self.choice.randrange(5)
        if kind == 0:
            torch.manual_seed(self.choice.randrange(3))
        elif kind == 1:
            self.generator.manual_seed(self.choice.randrange(3))
        elif kind == 2:
            self.states.append(torch.get_rng_state())
        elif kind == 3 and self.states:
            torch.set_rng_state(self.choice.choice(self.states))
        elif kind == 4 and self.states:
            self.generator.set_state(self.choice.choice(self.states))

    def ask(self) -> None:
        x = self.any()
        self.numbers.append(float(x.sum()))
        if x.mean() > 0:
            x.neg_() if x.is_contiguous() else self.make()

    def keep(self) -> None:
        number = len(list(self.net.children())) + len(self.net._parameters) + len(self.net._buffers)
        x = self.any()
        if self.choice.random() < 0.7:
            self.net.register_parameter(f"t{number}", nn.Parameter(x))
            self.pool.append(getattr(self.net, f"t{number}").data)
        else:
            self.net.register_buffer(f"t{number}", x)

    def swap_data(self) -> None:
        if self.net._parameters:
            param = self.choice.choice([p for p in self.net._parameters.values() if p is not None])
            param.data = self.any()


def compare(seed: int) -> None:
    length = 5 + seed % 40
    torch.manual_seed(seed)
    expected = Program(seed).run(length)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    with shardwise.deferred_init() as recipe:
        model = Program(seed).run(length)
    recipe.materialize(model)
    assert differences(model, expected) == []
    if recipe._seen and not any(torch.equal(seen.held, after) for seen in recipe._seen):
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("block", range(5))
def test_random_constructors_give_the_bits_of_ordinary_ones(block: int) -> None:
    for seed in range(block * FAST // 5, (block + 1) * FAST // 5):
        compare(seed)


@pytest.mark.matrix
@pytest.mark.parametrize("block", range(20))
def test_many_random_constructors_give_the_bits_of_ordinary_ones(block: int) -> None:
    for seed in range(FAST + block * 100, FAST + (block + 1) * 100):
        compare(seed)


@pytest.mark.parametrize("sabotage", ["order", "slice"])
def test_comparison_notices_sabotage(sabotage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sabotage == "order":  # draw without skipping what comes before
        monkeypatch.setattr(replay.Replay, "_state", lambda self, node: self._start_of(node.root))
    else:
        real = replay.Tape.slice
        monkeypatch.setattr(replay.Tape, "slice", lambda self, *args, **kwargs: real(self, *args, **kwargs)[-2:])
    failed = 0
    for seed in range(10):
        try:
            compare(seed)
        except Exception:
            failed += 1
    assert failed > 5
