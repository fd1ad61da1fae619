"""What forward, backward and step make themselves: every storage that an operator brings, until nobody holds it.

``Hollow`` of ``dryrun/hollow.py`` looks at the operators and computes them; here its storages are told to a recorder.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.accounting.held import links_of
from shardwise.dryrun.hollow import Hollow
from shardwise.dryrun.live import Live, has_storage
from shardwise.hooks import backward_is_running
from shardwise.managed import Managed
from shardwise.trace.recorder import Recorder

__all__ = ["count_activations"]


@contextmanager
def count_activations(managed: Managed, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder of the storages that operators make inside, as "activation" or "temporary" of a unit."""
    made = _Made(recorder)

    def ignore_states() -> None:
        for tensor in _states(managed):
            made.ignore(tensor)

    for tensor in (*_known(managed), *_states(managed)):
        made.ignore(tensor)
    recorder.before_states = ignore_states
    with Hollow(made, compute=True):
        try:
            yield
        finally:
            made.stop()
            recorder.before_states = None


def _known(managed: Managed) -> Iterator[Tensor]:
    """Yield what is on the timeline without us, and the model's buffers."""
    for unit in managed.runtime.units:
        for bucket in unit.buckets:
            yield from (bucket.params.full.tensor, bucket.params.shard, bucket.params.master)
            yield from (slab.tensor for slab in (bucket.grads.slabs() if bucket.grads is not None else ()))
            yield from (slab.tensor for link in links_of(managed) for slab in link.slabs_of(bucket))
    yield from managed.model.buffers()


def _states(managed: Managed) -> Iterator[Tensor]:
    for link in links_of(managed):
        for state in link.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class _Made(Live):
    """Storages that operators made, as ``Hollow`` sees them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._counted: dict[int, tuple[str, str, int]] = {}  # by storage: kind, unit, bytes; 0 bytes: not counted
        self._stopped = False

    def ignore(self, tensor: Tensor) -> None:
        """Do not count a storage, or no longer: it is on the timeline as something else."""
        key = tensor.untyped_storage()._cdata
        if key in self._counted:
            kind, owner, num_bytes = self._counted[key]
            self._counted[key] = kind, owner, 0
            if num_bytes:
                self._recorder.memory(kind, owner, -num_bytes)
        else:
            self._count(tensor, "", "", 0)

    def runs(self, operator: Any) -> None:
        """Note which operator runs."""
        self._recorder.operation = str(operator)

    def add(self, tensor: Tensor, *, hollow: bool = False) -> None:
        """Count a storage if it is new."""
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._counted or tensor.is_meta or self._stopped:
            return
        recorder = self._recorder
        kind = "temporary" if backward_is_running() or recorder.phase in ("backward", "step") else "activation"
        owner = recorder.units[-1] if recorder.units else "none"
        self._count(tensor, kind, owner, storage.nbytes())

    def stop(self) -> None:
        """Count no more; what is still held stays on the timeline."""
        self._stopped = True
        self._recorder.operation = ""

    def _count(self, tensor: Tensor, kind: str, owner: str, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        self._counted[storage._cdata] = kind, owner, num_bytes
        weakref.finalize(storage, self._freed, storage._cdata).atexit = False
        if num_bytes:
            self._recorder.memory(kind, owner, num_bytes)

    def _freed(self, key: int) -> None:
        kind, owner, num_bytes = self._counted.pop(key)
        if num_bytes and not self._stopped:
            self._recorder.memory(kind, owner, -num_bytes)
