"""What ``shard`` asks of a source of initial values: check with all ranks, deliver one parameter after the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.comm.base import Mesh, broadcast, reserve
from shardwise.errors import ConfigError, RankMismatchError
from shardwise.modules import NamedParam
from shardwise.numerics.fingerprint import fingerprint
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.record import Agreement

__all__ = ["Delivery", "Job", "Source", "fill", "named_tensors", "replace_tensors"]

Delivery = Iterator[tuple[NamedParam, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to fill, and the means to agree with the other ranks."""

    model: nn.Module
    params: Sequence[NamedParam]
    agreement: Agreement
    mesh: Mesh
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return all(comm.rank == 0 for comm in self.mesh.values())

    def check(self, problem: str) -> None:
        """Raise on every rank what any rank has to say.

        Raises:
            ConfigError: some rank's ``problem`` is not empty.
        """
        said = self.agreement.texts(problem, "initial values")
        loud = [(rank, text) for rank, text in enumerate(said) if text]
        if loud:
            rank, text = loud[0]
            raise ConfigError(text if len(loud) == len(said) else f"rank {rank}: {text}")

    def is_alike(self, code: int, label: str) -> bool:
        """Whether all ranks give the same number."""
        rows = self.agreement.words(torch.tensor([code], dtype=torch.int64), label)
        return len(set(rows.view(-1).tolist())) == 1

    def send(self, flat: Tensor, label: str) -> Tensor:
        """Return rank 0's flat tensor, on the job's device; other ranks give one of the same length and dtype."""
        buffer = flat.contiguous().to(self.device)
        broadcast(self.mesh, buffer, reserve(self.mesh, 1), 0, label)
        return buffer


class Source(Protocol):
    """Where initial values come from."""

    @property
    def label(self) -> str:
        """What ranks compare before anything happens."""

    def device_of(self, tensor: Tensor, name: str) -> torch.device:
        """Return where a parameter of the model will be; raises ``ConfigError`` if it cannot be delivered."""

    def begin(self, job: Job) -> Delivery:
        """Collective. Check everything, and raise alike on all ranks before anything changes; then deliver.

        The delivery is collective too, gives every parameter once in the same order on all ranks, and gives the other
        tensors of the model their values itself.
        """


def fill(delivery: Delivery, job: Job, buckets: Sequence[tuple[Bucket, Sequence[NamedParam]]]) -> None:
    """Write each parameter's value into the shards and masters, and check that all ranks saw the same values.

    Raises:
        RankMismatchError: names the first parameter of which ranks saw different values.
    """
    places = {id(p.param): (bucket, index) for bucket, params in buckets for index, p in enumerate(params)}
    codes = dict.fromkeys(places, 0)
    for p, value in delivery:
        codes[id(p.param)] = fingerprint(value)
        bucket, index = places[id(p.param)]
        bucket.params.adopt_value(bucket.site.layout.slots[index], value)
        del value  # [Note: one at a time] a variable of a loop would keep it while the next one is computed
    rows = job.agreement.words(torch.tensor(list(codes.values()), dtype=torch.int64), "initial values").cpu()
    names = {id(p.param): p.name for p in job.params}
    unlike = [names[key] for key, column in zip(codes, rows.T, strict=True) if len(set(column.tolist())) > 1]
    if unlike:
        raise RankMismatchError(
            f"ranks saw different initial values of {len(unlike)} parameters, first {unlike[0]} (unlike files, or "
            "processors of different kinds): give every rank the same file, or use rank0_only=True; build the model "
            "anew"
        )


def named_tensors(model: nn.Module, *, persistent: bool = False) -> list[tuple[str, Tensor]]:
    """Return every tensor the modules hold, each object once: parameters, buffers, attributes, items of containers.

    Args:
        model: the root.
        persistent: only what a state dict holds; every name of it.
    """
    found: list[tuple[str, Tensor]] = []
    own = vars(nn.Module()).keys()
    for prefix, module in model.named_modules(remove_duplicate=not persistent):
        dot = f"{prefix}." if prefix else ""
        held: dict[str, Any] = {**module._parameters, **module._buffers}
        if persistent:
            held = {name: value for name, value in held.items() if name not in module._non_persistent_buffers_set}
        else:
            held |= {name: value for name, value in vars(module).items() if name not in own}
        found += [(dot + name, value) for name, top in held.items() for value in _inside(top)]
    if persistent:
        return found
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in found:
        first.setdefault(id(tensor), (name, tensor))
    return list(first.values())


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _inside(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _inside(item)


def replace_tensors(model: nn.Module, values: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Put new tensors wherever the modules hold old ones: id of the old one -> (old, new)."""

    def new(value: Any) -> Any:
        if isinstance(value, Tensor):
            pair = values.get(id(value))
            if pair is None:
                return value
            pair[1].__dict__.update(value.__dict__)
            return pair[1].requires_grad_(value.requires_grad)
        if type(value) is list:
            value[:] = [new(item) for item in value]
        elif type(value) is dict:
            value.update({key: new(item) for key, item in value.items()})
        elif type(value) is tuple and any(id(tensor) in values for tensor in _inside(value)):
            return tuple(new(item) for item in value)
        return value

    own = vars(nn.Module()).keys()
    for module in model.modules():
        new(module._buffers)
        for name, value in list(vars(module).items()):
            if name not in own:
                vars(module)[name] = new(value)
