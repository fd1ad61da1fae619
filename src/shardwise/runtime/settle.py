"""Before the optimizer moves: finish the window, agree with all ranks, know the norm.

``Settlement`` is computed once per change of the gradients and then read by ``clip_grad_norm_``, the step and
``grad_norm``; clipping rescales the gradients without a second exchange.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from shardwise.errors import StateError
from shardwise.numerics.norm import combine_norms, fast_norms, scaled_norm
from shardwise.runtime.bucket import Bucket
from shardwise.runtime.record import Agreement, Record, Records
from shardwise.runtime.runtime import Runtime

__all__ = ["Settlement", "Settler"]


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What all ranks agreed on about the gradients.

    Attributes:
        grads_version: the state of the gradients this describes.
        norm: global L2 norm of the mean gradient.
        first_nonfinite: name of the first parameter with an infinite or NaN element, None if there is none.
        arrived: for each trainable bucket, by its index, the slots that got a gradient on any rank.
    """

    grads_version: int
    norm: float
    first_nonfinite: str | None
    arrived: Mapping[int, frozenset[int]]


class Settler:
    """Makes settlements for one runtime."""

    def __init__(self, runtime: Runtime, agreement: Agreement) -> None:
        self._runtime = runtime
        self.agreement = agreement
        self._last: Settlement | None = None
        self._count = -1.0
        self._averaged_at = -1  # number of backwards when gradients were divided by the count
        self._limit = ""
        self.describe: Callable[[], list[str]] = list

    def start_count(self) -> None:
        """From here on gradients are sums, to be divided by what ``add_count`` gets on all ranks; a window begins."""
        self._count, self._averaged_at = 0.0, -1

    def add_count(self, count: float) -> None:
        """Add the number of samples or tokens whose summed loss goes backward."""
        self._count += count

    def settle(self) -> Settlement:
        """Finish the window and exchange the step's record; a second call with the same gradients is free.

        Raises:
            StateError: a backward is running or failed, or the gradients were divided by a count and then grew.
            RankMismatchError: ranks did unlike things since the start; on every rank.
        """
        runtime = self._runtime
        runtime.check_idle()
        if self._last is not None and self._last.grads_version == runtime.grads_version:
            return self._last
        buckets = runtime.trainable_buckets()
        if runtime.scaler is not None and any(b.trainable_grads.arrived for b in buckets):
            runtime.scaler.check_scaled(runtime.num_backwards)
        records = self._records()
        waiting = [bucket for bucket, waits in zip(buckets, records.waiting, strict=True) if waits]
        if waiting:
            runtime.finish_window(waiting)
            records = self._records()
        if records.have_one_order and runtime.last_walk.events is not runtime.schedule.trace:
            runtime.schedule = runtime.schedule.agreed(runtime.last_walk.events)
        late = frozenset(unit.index for unit, is_late in zip(runtime.units, records.late, strict=True) if is_late)
        if not late <= runtime.schedule.late:
            runtime.schedule = runtime.schedule.with_late(late)
        norm = records.norm
        if min(records.counts) >= 0:
            norm *= self._divide_by_count(math.fsum(records.counts), len(records.counts))
        first = None
        if not math.isfinite(norm):
            norm, first = self._look_closer(2.0)
        arrived = _by_bucket(buckets, records.arrived)
        for bucket in buckets:
            bucket.trainable_grads.agree(arrived[bucket.site.index])
        self._last = Settlement(grads_version=runtime.grads_version, norm=norm, first_nonfinite=first, arrived=arrived)
        return self._last

    def norm(self, norm_type: float, max_norm: float = math.inf) -> float:
        """Return the global norm of any order of the settled gradients; all ranks must say the same limit."""
        self._limit = f"clip_grad_norm_ with max_norm={max_norm}, norm_type={norm_type}"
        settlement = self.settle()
        if norm_type == 2.0:
            return settlement.norm
        rows = self._exchange(self._norms(norm_type).view(torch.int64))
        norm = combine_norms([combine_norms(r, norm_type) for r in rows.view(torch.float64).tolist()], norm_type)
        return norm if math.isfinite(norm) else self._look_closer(norm_type)[0]

    def clip(self, factor: float) -> None:
        """Multiply the settled gradients by ``factor``; the settlement's norm follows."""
        settlement = self.settle()
        self._scale(factor)
        self._last = Settlement(
            grads_version=settlement.grads_version,
            norm=settlement.norm * factor,
            first_nonfinite=settlement.first_nonfinite,
            arrived=settlement.arrived,
        )

    def _divide_by_count(self, total: float, num_ranks: int) -> float:
        """Turn means over ranks into sums over ranks, divided by the count; return the factor."""
        if self._averaged_at == self._runtime.num_backwards:
            return 1.0
        if self._averaged_at >= 0:
            raise StateError(
                "gradients were divided by their count already (by a norm, a clip or an accessor) and then grew: call "
                "zero_grad() first, or look at gradients at the end of the window only"
            )
        if total <= 0:
            raise StateError("the count of the whole window is 0 on all ranks: there is nothing to average")
        self._averaged_at = self._runtime.num_backwards
        self._scale(num_ranks / total)
        return num_ranks / total

    def _scale(self, factor: float) -> None:
        for bucket in self._settled():
            owned = bucket.trainable_grads.owned
            self._runtime.means.lanes.on_compute(writes=[owned])
            owned.mul_(factor)

    def _records(self) -> Records:
        """Exchange what this rank has to say with all ranks.

        Raises:
            RankMismatchError: ranks did unlike things since the start; on every rank.
        """
        runtime, grads = self._runtime, [bucket.trainable_grads for bucket in self._runtime.trainable_buckets()]
        settings = [self._limit, *self.describe()]
        own = Record(
            step=runtime.num_steps,
            digest=runtime.means.journal.digest,
            order=runtime.last_walk.code,
            count=self._count,
            settings=xxhash.xxh64_intdigest("\n".join(settings).encode()) & ((1 << 62) - 1),
            arrived=[slot.index in half.arrived for half in grads for slot in half.site.layout.slots],
            waiting=[half.has_local for half in grads],
            late=[unit.index in runtime.late_here for unit in runtime.units],
        )
        records = Records(self._exchange(own.pack(self._norms(2.0))), own)
        self.agreement.check_records(records, runtime.means.journal, settings)
        return records

    def _settled(self) -> list[Bucket]:
        return [bucket for bucket in self._runtime.trainable_buckets() if bucket.trainable_grads.has_result]

    def _norms(self, norm_type: float) -> torch.Tensor:
        """Return the norm of this rank's finest slice of every bucket, fp64; 0 where there is no gradient."""
        device = self._runtime.means.arena.device
        empty = torch.empty(0, device=device)
        slices = [
            bucket.trainable_grads.own_slice if bucket.trainable_grads.has_result else empty
            for bucket in self._runtime.trainable_buckets()
        ]
        self._runtime.means.lanes.on_compute(reads=slices)
        return fast_norms(slices, norm_type, device)

    def _look_closer(self, norm_type: float) -> tuple[float, str | None]:
        """Take a norm that overflowed again, scaled, and find the first parameter that is not finite."""
        position, names, norms = 0, [], []
        first_bad = -1
        for bucket in self._runtime.trainable_buckets():
            grads, layout = bucket.trainable_grads, bucket.site.layout
            names += [slot.param.name for slot in layout.slots]
            if grads.has_result:
                norms.append(scaled_norm(grads.own_slice, norm_type))
                start, stop = bucket.site.bounds(len(bucket.site.placement.axes))
                for fragment in layout.fragments(start, stop):
                    offset = fragment.flat_start - start
                    piece = grads.own_slice[offset : offset + fragment.numel]
                    if first_bad < 0 and not bool(piece.isfinite().all()):
                        first_bad = position + fragment.slot.index
            position += len(layout.slots)
        word = torch.tensor([combine_norms(norms, norm_type)], dtype=torch.float64).view(torch.int64)
        own = torch.cat([word, torch.tensor([first_bad], dtype=torch.int64)])
        rows = self._exchange(own)
        norm = combine_norms(rows[:, 0].contiguous().view(torch.float64).tolist(), norm_type)
        found = [index for index in rows[:, 1].tolist() if index >= 0]
        return norm, names[min(found)] if found else None

    def _exchange(self, words: torch.Tensor) -> torch.Tensor:
        return self.agreement.words(words, f"record of step {self._runtime.num_steps}").cpu()


def _by_bucket(buckets: list[Bucket], arrived: Sequence[bool]) -> dict[int, frozenset[int]]:
    flags = iter(arrived)
    return {
        bucket.site.index: frozenset(slot.index for slot in bucket.site.layout.slots if next(flags))
        for bucket in buckets
    }
