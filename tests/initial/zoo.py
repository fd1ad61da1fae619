"""Constructors with every habit of initialisation that real models have, each a function that builds one module."""

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.gpt import GPT, GPTConfig

CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {}

_OUTSIDE = torch.arange(6.0)


def constructor(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    CONSTRUCTORS[build.__name__] = build
    return build


def parts(fill: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Register a constructor of a bare module that ``fill`` gives its parts."""

    def build() -> nn.Module:
        module = nn.Module()
        fill(module)
        return module

    CONSTRUCTORS[fill.__name__] = build
    return fill


@constructor
def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=11, context=8, width=12, heads=3, depth=2))


@constructor
def gpt_tied_with_generator() -> nn.Module:
    config = GPTConfig(vocab=11, context=8, width=12, heads=3, depth=2, tied=True)
    return GPT(config, generator=torch.Generator().manual_seed(5))


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)


@constructor
def convolutions_as_in_a_resnet() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 7), nn.BatchNorm2d(8), *(_Residual(8) for _ in range(2)), nn.Linear(8, 5))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 1)
            nn.init.constant_(module.bias, 0)
        elif isinstance(module, _Residual):
            nn.init.zeros_(module.norm2.weight)
    return net


class _Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.fc = nn.Linear(6, 6)


@constructor
def vision_transformer() -> nn.Module:
    net = nn.Module()
    rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
    net.blocks = nn.ModuleList(_Block(rate) for rate in rates)
    net.drops = torch.tensor([block.drop for block in net.blocks])
    net.token = nn.Parameter(torch.zeros(1, 1, 6))
    net.position = nn.Parameter(torch.randn(1, 4, 6) * 0.02)
    nn.init.trunc_normal_(net.token, std=0.02)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            module.bias.data.zero_()

    return net.apply(init)


@constructor
def transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


@constructor
def lstm() -> nn.Module:
    net = nn.LSTM(5, 7, 2, bidirectional=True)
    for name, param in net.named_parameters():
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(param)
        elif "bias" in name:
            param.data[7:14].fill_(1.0)
    return net


@constructor
def embeddings() -> nn.Module:
    net = nn.Sequential(nn.Embedding(9, 6, padding_idx=2), nn.EmbeddingBag(5, 4), nn.Linear(6, 9, bias=False))
    nn.init.normal_(net[0].weight, std=0.3)
    with torch.no_grad():
        net[0].weight[2].zero_()
    net[2].weight = net[0].weight
    return net


@constructor
def bfloat16() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(torch.bfloat16)


@parts
def several_dtypes(net: nn.Module) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        net.low = nn.Linear(7, 5)
        net.steps = nn.Parameter(torch.arange(3) * 0.5)
        net.register_buffer("line", torch.linspace(0, 1, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    net.half = nn.Linear(3, 3).half()
    net.double = nn.Linear(3, 3).double()


@parts
def every_init(net: nn.Module) -> None:
    inits: list[Callable[[Tensor], object]] = [
        nn.init.dirac_,
        nn.init.xavier_normal_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.kaiming_uniform_,
        nn.init.ones_,
        lambda t: nn.init.sparse_(t[:, :, 0], 0.5),
        lambda t: nn.init.eye_(t[0]),
        lambda t: nn.init.normal_(t, 1, 2, generator=torch.Generator().manual_seed(1)),
        lambda t: t.exponential_().log_(),
        lambda t: t.copy_(torch.bernoulli(torch.full_like(t, 0.5))),
        lambda t: t.copy_(torch.normal(torch.zeros_like(t), torch.rand_like(t))),
        lambda t: t.copy_(torch.poisson(torch.full_like(t, 2.0))),
        lambda t: t.copy_(F.dropout(torch.ones_like(t))),
        lambda t: t.random_(0, 9),
    ]
    for number, init in enumerate(inits):
        param = nn.Parameter(torch.zeros(6, 6, 3))
        init(param.data)
        net.register_parameter(f"p{number}", param)


@parts
def seeds_inside(net: nn.Module) -> None:
    torch.manual_seed(0)
    net.a = nn.Parameter(torch.randn(4))
    torch.manual_seed(0)
    net.b = nn.Parameter(torch.randn(4))
    state = torch.get_rng_state()
    net.c = nn.Parameter(torch.randn(4))
    torch.set_rng_state(state)
    net.d = nn.Parameter(torch.randn(4))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net.e = nn.Parameter(torch.rand(20))
    net.f = nn.Parameter(torch.randn(40))
    own = torch.Generator().manual_seed(3)
    net.g = nn.Parameter(torch.randn(3, generator=own))
    net.h = nn.Parameter(torch.empty(3).uniform_(generator=own))
    own.manual_seed(3)
    net.i = nn.Parameter(torch.rand(17, generator=own))


@parts
def edits_through_views(net: nn.Module) -> None:
    net.first, net.second = nn.Linear(4, 4), nn.Linear(4, 4)
    net.first.weight.data = torch.randn(4, 4) * 0.1
    net.first.weight.data[0].zero_()
    net.second.weight.data.copy_(net.first.weight.data.t())
    net.second.weight.data.copy_(net.second.weight)  # of itself
    net.first.bias.data.normal_()
    net.channels = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    net.first.weight.data[1].add_(1)
    torch._foreach_mul_([param.data for param in net.second.parameters()], 2.0)


@parts
def masks_and_indices(net: nn.Module) -> None:
    net.register_buffer("mask", torch.triu(torch.ones(5, 5), 1).bool(), persistent=False)
    net.register_buffer("waves", torch.polar(torch.ones(3), torch.arange(3.0)))
    net.w = nn.Parameter(torch.randn(5, 5))
    with torch.no_grad():
        net.w[net.mask] = 0.0
        net.w[torch.rand(5, 5) > 0.5] *= 2
        net.w[:, 1] += 1
        net.w[[0, 2]] = 7.0
        net.w[np.array([3])] = 5.0
        net.w.masked_fill_(net.mask, 3.0)


@parts
def one_storage_for_several(net: nn.Module) -> None:
    whole = torch.randn(4, 5)
    net.a, net.b = nn.Parameter(whole[0]), nn.Parameter(whole[1:3])
    net.register_buffer("c", whole[3])


@parts
def shapes_from_data(net: nn.Module) -> None:
    x = torch.randn(20)
    net.positive = nn.Parameter(x[x > 0])
    net.register_buffer("where", x.nonzero())
    net.register_buffer("chosen", torch.multinomial(torch.rand(10), 4))
    net.peak = nn.Parameter(torch.zeros(int(x.argmax()) + 1))
    wide = torch.randn(4)
    while wide.abs().max() > 1.0:
        wide = torch.randn(4)
    net.narrow = nn.Parameter(wide)


@parts
def numbers_from_outside(net: nn.Module) -> None:
    table = np.random.RandomState(0).randn(4, 4)
    net.register_buffer("table", torch.from_numpy(table).float())
    net.real = nn.Parameter(torch.from_numpy(table))
    net.copied = nn.Parameter(torch.tensor(table))
    net.embedding = nn.Embedding(4, 4)
    net.embedding.weight.data.copy_(torch.from_numpy(table))
    net.embedding.weight.requires_grad = False
    net.scaled = nn.Parameter(torch.randn(6) * _OUTSIDE)
    net.register_buffer("outside", _OUTSIDE * 2)
    net.listed = nn.Parameter(torch.tensor(torch.rand(5).tolist()))
    net.array = nn.Parameter(torch.tensor(torch.randn(3).numpy() * 2))
    net.stacked = nn.Parameter(torch.tensor([torch.randn(()), torch.ones(())]))


@parts
def devices_asked_for(net: nn.Module) -> None:
    net.linear = nn.Linear(3, 3, device="cpu")
    weight = net.linear.weight
    assert not weight.is_meta
    assert weight.device.type == "cpu"
    net.bias = nn.Parameter(torch.zeros(3, device=weight.device))
    weight.data.to("cpu").mul_(3)
    weight.data.cpu().add_(1)
    weight.data.to(torch.ones(1)).sub_(0.5)
    net.to("cpu", torch.float64)


@parts
def copies(net: nn.Module) -> None:
    net.a = nn.BatchNorm1d(3)
    net.b = copy.deepcopy(net.a)
    net.c = nn.Linear(3, 3)
    net.d = copy.deepcopy(net.c)
    net.e = nn.Linear(3, 3)
    net.e.load_state_dict(net.c.state_dict())
    net.f = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    net.g = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    net.h = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


@parts
def attributes(net: nn.Module) -> None:
    net.listed = [torch.randn(3), "text"]
    net.pair = (torch.ones(2), 1)
    net.named = {"x": torch.rand(2)}
    net._private = torch.randn(2)
    net.w = nn.Parameter(net._private * 2)


@parts
def factorised(net: nn.Module) -> None:
    u, _, v = torch.linalg.svd(torch.randn(6, 4), full_matrices=False)
    q, r = torch.linalg.qr(torch.randn(6, 6))
    net.u, net.v, net.q = nn.Parameter(u), nn.Parameter(v), nn.Parameter(q * r.diag().sign())
    net.inverse = nn.Parameter(torch.linalg.inv(torch.randn(3, 3)))
    net.spectrum = nn.Parameter(torch.fft.rfft(torch.randn(8)).real.clone())


@parts
def forward_in_the_constructor(net: nn.Module) -> None:
    net.lazy = nn.LazyLinear(4)
    net.lazy(torch.ones(2, 3))
    net.out = nn.Parameter(net.lazy(torch.ones(1, 3)).detach().norm(dim=1))
    net.spread = nn.Parameter(torch.tensor(float(net.lazy.weight.detach().std())))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model by name, tied ones under each name, attributes included."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in vars(nn.Module()):
                values = value if isinstance(value, list | tuple) else [value]
                values = list(value.values()) if isinstance(value, dict) else values
                for number, item in enumerate(values):
                    if isinstance(item, Tensor):
                        found[f"{prefix}.{name}:{number}"] = item
    return found


def differences(found: nn.Module, expected: nn.Module) -> list[str]:
    """Names of tensors that are not equal in bits, dtype, strides, class or flags."""
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert list(ours) == list(theirs)
    return [
        name
        for name, value in theirs.items()
        if ours[name].is_meta
        or not torch.equal(ours[name], value)
        or ours[name].dtype != value.dtype
        or ours[name].stride() != value.stride()
        or ours[name].requires_grad != value.requires_grad
        or type(ours[name]) is not type(value)
    ]


@constructor
def spectra() -> nn.Module:
    """Of functions that torch divides otherwise where a mode watches."""
    net = nn.Linear(20, 20)
    own = net.weight.detach()
    net.weight.data.div_(torch.linalg.matrix_norm(own, 2))
    for name, value in {
        "singular": torch.linalg.svdvals(own),
        "eigen": torch.linalg.eigvalsh(own),
        "spectral": torch.linalg.norm(own, 2),
        "nuclear": torch.linalg.matrix_norm(own, "nuc"),
        "old_nuclear": torch.norm(own, "nuc"),
        "method": own.norm(),
        "rows": own.norm(dim=1, keepdim=True),
        "condition": torch.linalg.cond(own),
        "rank": torch.linalg.matrix_rank(own),
        "graph": torch.linalg.svdvals(net.weight).detach(),
    }.items():
        net.register_buffer(name, value)
    return net
