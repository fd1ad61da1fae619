"""Putting a checkpoint's tensors into a sharded model: each rank reads its finest slices, the mesh brings the rest.

Every byte of the files is read by one rank. Nothing is allocated but one bucket's worth of state at a time, and what
the optimizer keeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.contents import all_buckets, links_of, persistent_buffers
from shardwise.checkpoint.manifest import DTYPES, Manifest, Stored
from shardwise.checkpoint.match import Match
from shardwise.checkpoint.plain import from_plain
from shardwise.checkpoint.source import TensorSource
from shardwise.comm.base import Verb
from shardwise.layout import Slot
from shardwise.managed import Managed
from shardwise.optim.families import state_at_start
from shardwise.optim.fragments import BucketFragments
from shardwise.optim.shard import OptimizerLink
from shardwise.runtime.bucket import Bucket

__all__ = ["place_buffers", "place_optimizer", "place_params", "wanted_ranges"]


def wanted_ranges(
    managed: Managed, matched: Match, manifest: Manifest, *, with_optimizers: bool
) -> Iterator[tuple[Stored, int, int]]:
    """Yield what this rank will read of parameters, and of the optimizers' state."""
    kinds = {"param", "compute", "optim"} if with_optimizers else {"param", "compute"}
    items: dict[str, list[Stored]] = {}
    for item in manifest.stored:
        if item.kind in kinds:
            items.setdefault(item.name, []).append(item)
    for bucket in all_buckets(managed):
        for piece in bucket.site.layout.fragments(*_finest(bucket)):
            for item in items.get(matched.names.get(piece.slot.param.name, ""), ()):
                yield item, piece.param_start, piece.param_start + piece.numel


@torch.no_grad()
def place_params(managed: Managed, matched: Match, source: TensorSource) -> None:
    """Write masters, shards and compute copies of every bucket; collective."""
    by_key = source.manifest.by_key
    for unit in managed.runtime.units:
        unit.uses.clear()
        unit.reshard()
        for bucket in unit.buckets:
            bucket.params.settle()
            names = {slot.param.name: matched.names.get(slot.param.name) for slot in bucket.site.layout.slots}
            _fill(bucket, bucket.params.master, matched.params, source)
            bucket.refresh_params()
            copies = {name: by_key[f"compute.{old}"] for name, old in names.items() if f"compute.{old}" in by_key}
            if copies and bucket.params.separate_master:
                _overlay(bucket, copies, source)
    for bucket in all_buckets(managed):
        bucket.params.settle()
    managed.note_update(all_buckets(managed))
    for link in links_of(managed):
        for fragments in link.fragments():
            fragments.note_versions()


@torch.no_grad()
def place_optimizer(
    link: OptimizerLink, groups: Sequence[Mapping[str, Any]], number: int, matched: Match, source: TensorSource
) -> None:
    """Give one optimizer the state of its parameters in one of the checkpoint, and its groups' options; collective."""
    facts = source.manifest.values.optimizers[number]
    by_key = source.manifest.by_key
    states = sorted({item.state for item in source.manifest.stored if (item.kind, item.optimizer) == ("optim", number)})
    for fragments in link.fragments():
        slots = fragments.bucket.site.layout.slots
        held = {index: _values(facts.scalars, matched, slots[index]) for index in fragments.params}
        new: dict[int, dict[str, object]] = {index: dict(values) for index, values in held.items()}
        for state in states:
            items = {
                slot.param.name: by_key[key]
                for slot in slots
                if (key := f"optim.{number}.{state}.{matched.names.get(slot.param.name)}") in by_key
            }
            for dtype in sorted({item.dtype for item in items.values()}):
                chosen = {name: item for name, item in items.items() if item.dtype == dtype}
                _fill_states(
                    link, fragments, state, chosen, _dtype_here(fragments, dtype, matched, chosen), source, new
                )
        _adopt_states(link, fragments, new)
    everything: dict[Any, Any] = link.optimizer.state
    for other in [key for key in everything if not isinstance(key, Tensor)]:
        del everything[other]
    everything.update({key: from_plain(value) for key, value in facts.other.items()})
    for group, options in zip(link.optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            _set_option(group, key, value)


@torch.no_grad()
def place_buffers(managed: Managed, matched: Match, source: TensorSource, rank: int) -> None:
    """Give every buffer the values of this rank, or of rank 0 where this rank did not exist."""
    for name, buffer in persistent_buffers(managed.model).items():
        if name in matched.buffers:
            item = matched.buffers[name]
            values = torch.empty(item.numel, dtype=DTYPES[item.dtype])
            if item.kind == "buffer":
                source.read_copy(item, rank, values)
            else:
                source.read(item, 0, values)
            whole = values.view(item.shape)
            if buffer.is_complex():  # perhaps a conjugate, of which there is no real view
                whole = torch.view_as_complex(whole.to(buffer.dtype.to_real()))
            buffer.copy_(whole)


def _finest(bucket: Bucket) -> tuple[int, int]:
    return bucket.site.bounds(len(bucket.site.placement.axes))


def _fill(bucket: Bucket, flat: Tensor, items: Mapping[str, Stored], source: TensorSource) -> None:
    """Write this rank's range of O, ``flat``: read the finest slice, gather it over the other axes."""
    site = bucket.site
    begin, depth = site.bounds(site.placement.num_optim)[0], site.placement.num_optim
    site.lanes.on_compute(writes=[flat])
    for piece in site.layout.fragments(*_finest(bucket)):
        item = items.get(piece.slot.param.name)
        if item is not None:
            first = piece.flat_start - begin
            source.read(item, piece.param_start, flat[first : first + piece.numel])
    for work in site.gather(flat, Verb.ACCESS, base=depth, depth=len(site.placement.axes)):
        if work is not None:
            work.wait()


def _overlay(bucket: Bucket, items: Mapping[str, Stored], source: TensorSource) -> None:
    """Write the compute copies that are not the rounded masters."""
    site, params = bucket.site, bucket.params
    params.settle()
    base = site.placement.num_param
    begin = site.bounds(base)[0]
    site.lanes.on_compute(writes=[params.shard])
    for piece in site.layout.fragments(*_finest(bucket)):
        item = items.get(piece.slot.param.name)
        if item is not None:
            first = piece.flat_start - begin
            source.read(item, piece.param_start, params.shard[first : first + piece.numel])
    for work in site.gather(params.shard, Verb.ACCESS, base=base, depth=len(site.placement.axes)):
        if work is not None:
            work.wait()


def _values(scalars: Mapping[str, Mapping[str, object]], matched: Match, slot: Slot) -> dict[str, object]:
    """Return the state of a parameter that is one value."""
    saved = scalars.get(matched.names.get(slot.param.name, ""), {})
    return {key: from_plain(value) for key, value in saved.items()}


def _dtype_here(fragments: BucketFragments, dtype: str, matched: Match, items: Mapping[str, Stored]) -> torch.dtype:
    """Return the dtype of a state here: that of the master if it was that, or is wider; else its own."""
    masters = {matched.params[name].dtype for name in items}
    here, saved = fragments.bucket.params.master.dtype, DTYPES[dtype]
    wider = saved.is_floating_point and saved.itemsize > here.itemsize  # which torch's kernels do not take
    return here if masters == {dtype} or wider else saved


def _fill_states(
    link: OptimizerLink,
    fragments: BucketFragments,
    state: str,
    items: Mapping[str, Stored],
    dtype: torch.dtype,
    source: TensorSource,
    new: dict[int, dict[str, object]],
) -> None:
    bucket = fragments.bucket
    flat = torch.zeros_like(bucket.params.master, dtype=dtype)
    _fill(bucket, flat, items, source)
    begin = bucket.site.bounds(bucket.site.placement.num_optim)[0]
    for index, param in fragments.params.items():
        if bucket.site.layout.slots[index].param.name in items:
            piece = fragments.parts[index]
            own = flat[piece.flat_start - begin : piece.flat_start - begin + piece.numel]
            old = link.optimizer.state.get(param, {}).get(state)
            fits = isinstance(old, Tensor) and (old.shape, old.dtype) == (own.shape, dtype) and not old.is_inference()
            new[index][state] = old.copy_(own) if fits else own.clone()


def _adopt_states(link: OptimizerLink, fragments: BucketFragments, new: Mapping[int, dict[str, object]]) -> None:
    optimizer = link.optimizer
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    for index, param in fragments.params.items():
        group = group_of.get(id(param), optimizer.defaults)
        optimizer.state.pop(param, None)
        state = new[index] or state_at_start(type(optimizer), group, param)
        if state:
            on_device = group.get("capturable") or group.get("fused")
            step = state.get("step")
            if isinstance(step, Tensor) and step.dim() == 0 and on_device:
                state["step"] = step.to(param.device)
            optimizer.state[param] = state


def _set_option(group: dict[str, object], key: str, value: object) -> None:
    old = group.get(key)
    if isinstance(old, Tensor) and not old.is_inference():
        old.copy_(torch.as_tensor(value))
    else:
        group[key] = value.item() if isinstance(value, Tensor) and old is not None else value
