"""``initialize`` and ``Engine``: DeepSpeed's shape of a training loop, over the composable functions.

The engine owns batch arithmetic, the accumulation window, clipping, the scheduler and the counters; everything else
is ``api.py``. What each habit of a loop means is in docs/engine.md, the same at all stages.
"""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.accounting.shortage import raise_explained
from shardwise.accumulation import AccumulationWindow, checked_count, is_divided_by
from shardwise.api import clip_grad_norm_, scale_loss
from shardwise.config.resolve import Resolved
from shardwise.engine_state import EngineCheckpoints
from shardwise.errors import ConfigError, StateError
from shardwise.launch.group import leave_group
from shardwise.managed import Managed
from shardwise.optim.shard import ShardedOptimizer
from shardwise.runtime.runtime import Window

__all__ = ["Engine"]


class Engine(EngineCheckpoints):
    """One sharded model, its optimizer and its scheduler, driven by ``engine(...)``, ``backward`` and ``step``.

    A *window* is the micro-batches of one update: ``gradient_accumulation_steps()`` calls of ``step``, of which the
    last one updates. Attributes of the model that the engine does not have are the model's.

    Attributes:
        module: the sharded model.
        optimizer: the sharded optimizer; None if the engine only evaluates.
        lr_scheduler: advances once per applied update.
        settings: the resolved configuration.
        global_steps: updates so far, skipped ones included.
        global_samples: samples of these updates, over all ranks.
        skipped_steps: updates that were left out because gradients were not finite.
        micro_steps: calls of ``step`` so far.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        settings: Resolved,
        *,
        loader: Any = None,
        is_first: bool = True,
        owns_group: bool = False,
    ) -> None:
        super().__init__()
        self._loader = loader
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.settings = settings
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self._window = AccumulationWindow(settings.batch, settings.num_ranks)
        self._managed = Managed.of(module)
        self._is_first = is_first
        self._owns_group = owns_group
        self._alive = True
        self._in_no_sync = False
        self._grad_norm: float | None = None
        self._applied = False
        self._counts = settings.config.loss_reduction == "sum"
        self._scheduler_epoch = getattr(lr_scheduler, "last_epoch", None)
        self._warned: set[str] = set()
        self._counted_from = self._num_counted = 0  # backwards: at the window's start, and with a count since
        window, describe = self._window, self._managed.settler.describe
        self._managed.settler.describe = lambda: [*describe(), f"windows of {window.length} micro-batches"]
        self._restart_count()
        self._set_window()

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute if the engine has none of this name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" not in modules:
                raise
            return getattr(modules["module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._check_alive()
        try:
            return self.module(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            raise_explained(self._managed, error)
            raise

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        count: float | Tensor | None = None,
    ) -> Tensor:
        """Run the backward of one micro-batch; gradients of a window are averaged over its micro-batches.

        ``loss.backward()`` does the same (in fp16: ``engine.scale(loss).backward()``), without the checks.

        Args:
            loss: scalar of this rank's micro-batch: a mean, or a sum where ``loss_reduction`` is "sum".
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide by the window; False where the caller has divided already.
            count: with ``loss_reduction = "sum"``: number of samples or tokens in the sum (may be 0); the window's
                gradient is the sum over micro-batches and ranks divided by the sum of all counts.

        Returns:
            The loss as it was given, not divided and not scaled.

        Raises:
            ConfigError: ``count`` is missing where it is needed, or given where it has no meaning.
            StateError: there is no optimizer, or the loss is not a scalar.
            OutOfMemoryError: memory cannot be had; so do the forward and ``step``.
        """
        self._check_trains("backward")
        given: Any = loss
        if not isinstance(given, Tensor) or given.numel() != 1:
            raise StateError(
                "backward: the loss must be a tensor of one element; call tensor.backward(grad) for others"
            )
        number = self._checked_count(count)
        window = self._window.length
        if scale_wrt_gas and window > 1 and not self._counts and is_divided_by(loss, window):
            warnings.warn(
                f"backward: the loss seems to be divided by the window ({window}) already, and the engine divides it "
                "too: pass scale_wrt_gas=False, or do not divide",
                stacklevel=2,
            )
        runtime = self._managed.runtime
        factor, runtime.factor = runtime.factor, runtime.factor if scale_wrt_gas else 1.0
        before = runtime.num_backwards
        try:
            scale_loss(self.module, loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException as error:
            if runtime.in_backward:  # the window's gradients are going to be discarded
                self._restart_count()
            if isinstance(error, Exception):
                raise_explained(self._managed, error)
            raise
        finally:
            runtime.factor = factor
        if number is not None:
            self._managed.settler.add_count(number)
        self._num_counted += runtime.num_backwards - before
        self._window.num_backwards += 1
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, for a backward of the caller's own; the same tensor unless fp16."""
        self._check_trains("scale")
        return scale_loss(self.module, loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the end of a window clip, update, clear the gradients, advance the scheduler.

        Args:
            lr_kwargs: passed on to the scheduler's ``step``.

        Raises:
            StateError: inside ``no_sync``, or there is no optimizer.
            NonFiniteError: gradients are not finite and ``on_nonfinite`` is "raise".
        """
        self._check_trains("step")
        if self._in_no_sync:
            raise StateError("step: the window cannot end inside no_sync()")
        window = self._window
        if window.num_backwards > 1 and window.length > 1 and window.by_hand is None:
            self._warn_once(
                "several_backwards",
                f"step: {window.num_backwards} backwards since the last step(). The window counts calls of step(): "
                "call it after every micro-batch, or set the boundary by hand: set_gradient_accumulation_boundary()",
            )
        self._applied = False
        if lr_kwargs and self.lr_scheduler is None:
            raise StateError("step: lr_kwargs are for a scheduler, and the engine has none")
        updates = window.ends_next
        if updates:
            try:
                self._update()
            except (RuntimeError, MemoryError) as error:
                raise_explained(self._managed, error)
                raise
        window.advance(updated=updates)
        self.micro_steps += 1
        self._set_window()
        if self._applied and self.lr_scheduler is not None:
            self._advance_scheduler(dict(lr_kwargs or {}))
        if updates:
            self._log()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the window's gradients so far, at every stage; its remaining micro-batches still count."""
        self._check_alive()
        if self._window.is_open:
            self._warn_once(
                "zero_grad",
                f"zero_grad: inside an accumulation window ({self._window.num_steps} of {self._window.length} "
                "micro-batches done): their gradients are discarded. step() clears gradients after every update",
            )
        if self.optimizer is None:
            self.module.zero_grad(set_to_none)
        else:
            self.optimizer.zero_grad(set_to_none)
        self._restart_count()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards inside local, at every stage; ``step`` is not allowed inside."""
        self._check_alive()
        if self._in_no_sync:
            raise StateError("no_sync: is active already")
        self._in_no_sync = True
        self._set_window()
        try:
            yield
        finally:
            self._in_no_sync = False
            self._set_window()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step`` updates."""
        return self._window.ends_next

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backwards and ``step`` are the last of a window, until it is said otherwise.

        Gradients are still divided by ``gradient_accumulation_steps()``.
        """
        self._window.by_hand = bool(is_boundary)
        self._set_window()

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._window.batch.accumulation

    def train_batch_size(self) -> int:
        """Samples per update, over all ranks."""
        return self._window.batch.size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self._window.batch.micro

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per update, over all ranks, by changing the window.

        Raises:
            ConfigError: not a multiple of the micro-batch times the ranks.
            StateError: inside a window.
        """
        self._window.resize(size=train_batch_size)
        self._set_window()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward; the window stays, the samples per update follow.

        A loader that exists keeps its own size.

        Raises:
            ConfigError: not a positive number.
            StateError: inside a window.
        """
        self._window.resize(micro=micro_batch_size)
        self._set_window()

    def set_gradient_accumulation_steps(self, accumulation: int) -> None:
        """Change the window; the samples per update follow.

        Raises:
            ConfigError: not a positive number.
            StateError: inside a window.
        """
        self._window.resize(length=accumulation)
        self._set_window()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the mean gradient of the last update, before clipping; None before the first."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        self._check_trains("get_lr")
        assert self.optimizer is not None
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1 unless a trainable parameter is fp16."""
        scaler = self._managed.runtime.scaler
        return 1.0 if scaler is None else scaler.scale

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` changed the parameters."""
        return self._applied

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.settings.config.stage

    @property
    def device(self) -> torch.device:
        """Where the shards live, and inputs should."""
        return self._managed.device

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.settings.num_ranks

    def destroy(self) -> None:
        """Take hooks, memory and the process group that ``initialize`` made away; the engine and its model are void."""
        if self._alive:
            if self._managed.pending_save is not None:
                self._managed.pending_save.wait()
            self._alive = False
            self._managed.release(keep=False)
            if self.optimizer is not None:
                self.optimizer.state.clear()
                for group in self.optimizer.param_groups:
                    group["params"].clear()
            if self._owns_group:
                leave_group()

    def _update(self) -> None:
        assert self.optimizer is not None
        if self._counts and self._managed.runtime.num_backwards - self._counted_from != self._num_counted:
            raise StateError(
                'step: with loss_reduction = "sum" every backward needs a count, and some were loss.backward(): call '
                "engine.backward(loss, count=...), and zero_grad() before the next window"
            )
        config = self.settings.config
        settlement = self._managed.settler.settle()
        if not any(settlement.arrived.values()):
            self._warn_once("no_gradient", "step: no gradient came since the last update, on any rank: nothing changes")
        self._grad_norm = float(clip_grad_norm_(self.module, config.clip_grad_norm or math.inf))
        self.optimizer.step()
        self._applied = self.optimizer.step_was_applied
        self.optimizer.zero_grad()
        self._restart_count()
        self.global_steps += 1
        self.global_samples += self._window.batch.size
        if not self._applied:
            self.skipped_steps += 1

    def _after_load(self) -> None:
        """A checkpoint was loaded: a window begins."""
        self._window.restart()
        self._grad_norm, self._applied = None, False
        scheduler = self.lr_scheduler
        self._scheduler_epoch = getattr(scheduler, "last_epoch", None)
        self._restart_count()
        self._set_window()

    def _log(self) -> None:
        every = self.settings.config.log_every
        if every is not None and self.global_steps % every == 0 and self._is_first:
            rates = ", ".join(f"{rate:.4g}" for rate in self.get_lr())
            norm = f"grad norm {self._grad_norm:.4g}"
            sys.stdout.write(f"step {self.global_steps}  lr {rates}  {norm}  skipped {self.skipped_steps}\n")
            sys.stdout.flush()

    def _advance_scheduler(self, lr_kwargs: dict[str, Any]) -> None:
        scheduler = self.lr_scheduler
        if getattr(scheduler, "last_epoch", None) != self._scheduler_epoch:
            self._warn_once(
                "scheduler",
                "the scheduler was advanced by somebody else too: step() advances it once per applied update",
            )
        scheduler.step(**lr_kwargs)
        self._scheduler_epoch = getattr(scheduler, "last_epoch", None)

    def _set_window(self) -> None:
        """Tell the runtime what the next backward does with its gradients."""
        runtime = self._managed.runtime
        if self._in_no_sync:
            runtime.window = Window.DEFER
        elif self.is_gradient_accumulation_boundary():
            runtime.window = Window.FINAL
        else:
            runtime.window = Window.REDUCE if self.settings.config.stage >= 2 else Window.DEFER
        runtime.factor = 1.0 if self._counts else 1.0 / self._window.batch.accumulation

    def _restart_count(self) -> None:
        self._counted_from, self._num_counted = self._managed.runtime.num_backwards, 0
        if self._counts:
            self._managed.settler.start_count()

    def _checked_count(self, count: float | Tensor | None) -> float | None:
        if (count is None) is self._counts:
            raise ConfigError(
                'backward: with loss_reduction = "sum" every loss needs its count= of samples or tokens'
                if self._counts
                else 'backward: count= has a meaning with loss_reduction = "sum" only; here losses are averaged'
            )
        return None if count is None else checked_count(count)

    def _check_alive(self) -> None:
        if not self._alive:
            raise StateError("the engine was destroyed: build a new model and initialize again")

    def _check_trains(self, what: str) -> None:
        self._check_alive()
        if self.optimizer is None:
            raise StateError(
                f"{what}: the engine has no optimizer: pass one to initialize(), or name one in the config"
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=4)
