"""Whole tensors out of shards, and this rank's part of them: parameters, gradients, optimizer state, state dicts.

The ``full_*`` functions are collective: every rank calls them, every rank gets whole tensors of its own. They gather
one bucket at a time. The ``local_*`` functions move nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.accounting.held import optimizer_bytes
from shardwise.comm.base import Verb, flat_rank
from shardwise.managed import Managed
from shardwise.memory import Kind
from shardwise.modules import collect_params
from shardwise.optim.shard import OptimizerLink
from shardwise.runtime.bucket import Bucket

__all__ = [
    "full_gradients",
    "full_optimizer_state",
    "full_parameters",
    "full_state_dict",
    "iterate_full_parameters",
    "local_gradients",
    "local_optimizer_state",
    "local_parameters",
    "measured_bytes",
]

Source = Callable[[Bucket], Tensor | None]  # this rank's range of O, [numel / |O|]


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter whole, in the precision the optimizer keeps it, by name; aliases are not repeated.

    Collective. The tensors are copies.
    """
    managed = Managed.of(model)
    managed.council.round("full_parameters")
    return _ordered(model, _full(managed, _buckets(model), lambda bucket: bucket.params.master))


def iterate_full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what ``full_parameters`` returns, sorted by name, with one bucket gathered at a time.

    Collective: every rank goes through to the end. A tensor is a view of the gathered bucket: use it, or copy it,
    before the next one.
    """
    managed = Managed.of(model)
    managed.council.round("iterate_full_parameters")
    places = {slot.param.name: (bucket, slot) for bucket in _buckets(model) for slot in bucket.site.layout.slots}
    gathered: tuple[Bucket, Tensor] | None = None
    for name in sorted(places):
        bucket, slot = places[name]
        if gathered is None or gathered[0] is not bucket:
            gathered = None  # [Note: one at a time] its memory goes before the next one's comes
            gathered = bucket, _gathered(bucket, bucket.params.master)
        yield name, gathered[1][slot.start : slot.stop].view(slot.param.shape)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the mean gradient over all ranks of every parameter that has one, by name.

    Collective; ends an open window as a step would. The tensors are copies in the accumulate dtype.
    """
    managed = Managed.of(model)
    managed.council.round("full_gradients")
    arrived = managed.settler.settle().arrived
    buckets = [bucket for bucket in managed.runtime.trainable_buckets() if bucket.trainable_grads.has_result]
    found = _full(managed, buckets, lambda bucket: bucket.trainable_grads.owned)
    names = {
        slot.param.name
        for bucket in buckets
        for slot in bucket.site.layout.slots
        if slot.index in arrived[bucket.site.index]
    }
    return {name: grad for name, grad in _ordered(model, found).items() if name in names}


def full_optimizer_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the element-wise optimizer state of every parameter whole: name -> state name -> tensor.

    Collective. Scalar counters are 0-dim tensors and are those of the rank that owns part of the parameter.
    """
    managed = Managed.of(model)
    managed.council.round("full_optimizer_state")
    result: dict[str, dict[str, Tensor]] = {}
    for link in _links(managed):
        names = _state_names(managed, link)
        for fragments in link.fragments():
            bucket = fragments.bucket
            for state_name in names:
                flat = torch.zeros_like(bucket.params.master)
                present = torch.zeros(len(bucket.site.layout.slots), dtype=torch.int64)
                for index, part in fragments.parts.items():
                    value = link.optimizer.state.get(fragments.params[index], {}).get(state_name)
                    if isinstance(value, Tensor):
                        offset = part.flat_start - bucket.site.bounds(bucket.site.placement.num_optim)[0]
                        whole = value.shape == fragments.params[index].shape
                        present[index] = 2 if whole else 1
                        flat[offset : offset + part.numel] = value if whole else value.to(flat)
                rows = managed.settler.agreement.words(present, f"state {state_name}").cpu().amax(dim=0).tolist()
                full = _full(managed, [bucket], lambda _, flat=flat: flat)  # type: ignore[misc]
                for slot in bucket.site.layout.slots:
                    if rows[slot.index]:
                        tensor = full[slot.param.name]
                        scalar = rows[slot.index] == 1 and tensor.numel() > 0
                        result.setdefault(slot.param.name, {})[state_name] = tensor.view(-1)[0] if scalar else tensor
    return result


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, offload_to_cpu: bool = False) -> dict[str, Tensor]:
    """Return what ``state_dict()`` of the plain model would hold: parameters in their own dtype, buffers, all names.

    Collective. Tied names share one tensor, as in a plain state dict; every tensor has its own memory otherwise.

    Args:
        model: a sharded model.
        rank0_only: the other ranks get an empty one, and hold one bucket at a time.
        offload_to_cpu: tensors come to the host one after the other.
    """
    managed = Managed.of(model)
    managed.council.round("full_state_dict")
    keeps = not rank0_only or flat_rank(managed.mesh) == 0
    buckets = _buckets(model)
    full = _full(managed, buckets, lambda bucket: bucket.params.owned(), keeps=keeps, on_host=offload_to_cpu)
    result: dict[str, Tensor] = {}
    if not keeps:
        return result
    names = {alias: p.name for p in collect_params(model) for alias in (p.name, *p.aliases)}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module._parameters.items():
            if param is not None:
                result[dot + name] = full[names[dot + name]]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                result[dot + name] = _copy(buffer.detach(), on_host=offload_to_cpu)
    return result


def local_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's part of every master parameter, flat, by name; names of which it owns nothing are missing.

    The tensors are live views: read them between steps, do not keep them. Editing them is an error at the next forward
    or step: edit inside ``unsharded``.
    """
    loans = Managed.of(model).loans
    found = _local(_buckets(model), lambda bucket: bucket.params.master)
    return {name: loans.lend(part) for name, part in found}


def local_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's part of every reduced gradient, flat, by name. Live views.

    Call it after ``clip_grad_norm_`` or before ``step``, on every rank: it ends an open window. Edits count: the norm
    is taken anew.
    """
    managed = Managed.of(model)
    arrived = managed.settler.settle().arrived
    managed.runtime.grads_version += 1
    buckets = [bucket for bucket in managed.runtime.trainable_buckets() if bucket.trainable_grads.has_result]
    return {
        slot_name: grad
        for bucket in buckets
        for slot_name, grad in _local([bucket], lambda b: b.trainable_grads.owned)
        if any(s.param.name == slot_name and s.index in arrived[bucket.site.index] for s in bucket.site.layout.slots)
    }


def local_optimizer_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return this rank's optimizer state, flat, by parameter name and state name. Live tensors."""
    managed = Managed.of(model)
    result: dict[str, dict[str, Tensor]] = {}
    for link in _links(managed):
        for fragments in link.fragments():
            for index, param in fragments.params.items():
                state = link.optimizer.state.get(param, {})
                name = fragments.bucket.site.layout.slots[index].param.name
                found = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                if found:
                    result[name] = found
    return result


def measured_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes this rank holds at rest, by kind: "param", "master", "grad", "optim".

    Optimizer state is read from the optimizers; scalar counters are left out.
    """
    managed = Managed.of(model)
    ledger = managed.runtime.means.arena.ledger.now
    return {
        "param": ledger[Kind.PARAM],
        "master": ledger[Kind.MASTER],
        "grad": ledger[Kind.GRAD],
        "optim": sum(optimizer_bytes(managed).values()),
    }


def _buckets(model: nn.Module) -> list[Bucket]:
    return [bucket for unit in Managed.of(model).runtime.units for bucket in unit.buckets]


def _links(managed: Managed) -> list[OptimizerLink]:
    return [link for link in managed.optimizers if isinstance(link, OptimizerLink)]


def _state_names(managed: Managed, link: OptimizerLink) -> list[str]:
    """Return the names of tensor states that any rank has, in an order all ranks share."""
    everything: dict[Any, Any] = link.optimizer.state  # what stands under other keys than parameters is anything
    states = [state for param, state in everything.items() if isinstance(param, Tensor)]
    own = sorted({key for state in states for key, v in state.items() if isinstance(v, Tensor)})
    answers = managed.settler.agreement.texts("\n".join(own), "names of optimizer states")
    return sorted({name for answer in answers for name in answer.split("\n") if name})


def _ordered(model: nn.Module, found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {p.name: found[p.name] for p in collect_params(model) if p.name in found}


def _local(buckets: list[Bucket], source: Source) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        site = bucket.site
        bucket.params.settle()
        start, stop = site.bounds(site.placement.num_optim)
        flat = source(bucket)
        if flat is not None:
            site.lanes.on_compute(reads=[flat])
            for part in site.layout.fragments(start, stop):
                offset = part.flat_start - start
                yield part.slot.param.name, flat[offset : offset + part.numel]


def _full(
    managed: Managed, buckets: list[Bucket], source: Source, *, keeps: bool = True, on_host: bool = False
) -> dict[str, Tensor]:
    """Gather this rank's ranges of O to whole tensors, and copy them unless this rank keeps none."""
    result: dict[str, Tensor] = {}
    for bucket in buckets:
        bucket.params.settle()
        owned = source(bucket)
        if owned is None:
            continue
        full = _gathered(bucket, owned)
        for slot in bucket.site.layout.slots if keeps else ():
            part = full[slot.start : slot.stop].view(slot.param.shape)
            result[slot.param.name] = _copy(part, on_host=on_host)
        del full  # before the next one comes
    return result


@torch.no_grad()
def _gathered(bucket: Bucket, owned: Tensor) -> Tensor:
    """Gather a bucket whole, [numel], of this rank's range of O."""
    site, depth = bucket.site, bucket.site.placement.num_optim
    bucket.params.settle()
    site.lanes.on_compute(reads=[owned])
    full = owned.new_empty(site.layout.numel)
    site.view(full, 0, depth).copy_(owned)
    for work in site.gather(full, Verb.ACCESS, base=0, depth=depth):
        if work is not None:
            work.wait()
    return full


def _copy(tensor: Tensor, *, on_host: bool) -> Tensor:
    return tensor.to("cpu", copy=True) if on_host else tensor.clone()
