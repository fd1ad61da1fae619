"""What an engine saves beside the model, and DeepSpeed's names for saving and loading; a part of ``Engine``.

The format, its checks and its guarantees are those of ``checkpoint/``.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from shardwise.access import full_state_dict
from shardwise.accumulation import AccumulationWindow
from shardwise.checkpoint.calls import load_checkpoint, save_checkpoint
from shardwise.checkpoint.contents import Stateful
from shardwise.checkpoint.folder import read_manifest, replace_file
from shardwise.checkpoint.load import resolve_tag
from shardwise.checkpoint.names import LATEST, check_tag
from shardwise.checkpoint.save import describe
from shardwise.checkpoint.tensorfile import each_once
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError, StateError
from shardwise.managed import Managed
from shardwise.optim.closed_form import ClosedForm

__all__ = ["COUNTERS", "EngineCheckpoints"]

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class _Counters:
    """The counters of an engine as an object with a state."""

    def __init__(self, engine: "EngineCheckpoints") -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {name: getattr(self._engine, name) for name in COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counters.

        Raises:
            StateError: one is missing or no count.
        """
        if any(type(state.get(name)) is not int or state[name] < 0 for name in COUNTERS):
            raise StateError(f"the counters of the engine are malformed: {str(state)[:200]}")
        for name in COUNTERS:
            setattr(self._engine, name, state[name])


class EngineCheckpoints(nn.Module):
    """Saving and loading, in DeepSpeed's words."""

    module: nn.Module
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    lr_scheduler: Any
    optimizer: Any
    _managed: Managed
    _window: AccumulationWindow
    _loader: Any
    _is_first: bool
    if TYPE_CHECKING:
        # of ``Engine``
        def _check_alive(self) -> None: ...
        def _after_load(self) -> None: ...
        def _warn_once(self, kind: str, text: str) -> None: ...

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        background: bool = False,
        keep_last: int | None = None,
    ) -> bool:
        """Save model, optimizer, scheduler, loader, counters, loss scale and random generators. Collective.

        Args:
            save_dir: folder of the run's checkpoints.
            tag: name; None: ``global_step<updates>``. A checkpoint of this name is replaced, in one step.
            client_state: anything that JSON can say; ``load_checkpoint`` returns it.
            save_latest: let the file ``latest`` name it.
            exclude_frozen_parameters: leave out parameters that do not train (load with load_module_strict=False).
            background: return at once and write beside training; what training would change is copied before it does.
            keep_last: remove whole checkpoints but the last so many.

        Returns:
            True.

        Raises:
            CheckpointError: it was not saved; the same on all ranks, and nothing partial is visible.
            ConfigError: the tag is no name, or something cannot be kept.
        """
        self._check_alive()
        if self._window.is_open:
            self._warn_once(
                "save_in_window",
                f"save_checkpoint: inside an accumulation window ({self._window.num_steps} of {self._window.length} "
                "micro-batches done): their gradients are not saved, so a resumed run differs. Save after an update",
            )
        save_checkpoint(
            self.module,
            save_dir,
            tag=f"global_step{self.global_steps}" if tag is None else str(tag),
            step=self.global_steps,
            objects=self._objects(),
            user_state=None if client_state is None else dict(client_state),
            overwrite=True,
            set_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            keep_last=keep_last,
            background=background,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:
        """Load what ``save_checkpoint`` saved, at any stage and number of ranks. Collective.

        Args:
            load_dir: folder of the run's checkpoints.
            tag: name; None: what the file ``latest`` names. Without that file nothing is loaded, with a warning.
            load_module_strict: names of parameters and buffers must be the same.
            load_optimizer_states: load the optimizer's state and options.
            load_lr_scheduler_states: load the scheduler's position; the next update has the rate that it has there now.
                Without the optimizer's state, a scheduler that does not tell its rates is a warning.
            load_module_only: load parameters and buffers, nothing else.
            custom_load_fn: not possible here.

        Returns:
            The checkpoint's directory and the client state; None twice if there was nothing to load.

        Raises:
            CheckpointError: it is missing, damaged or does not fit; nothing was loaded; the same on all ranks.
        """
        self._check_alive()
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint: custom_load_fn would copy into shards: load, then edit inside shardwise.unsharded()"
            )
        if tag is None and self._has_no_latest(Path(load_dir)):
            if self._is_first:
                warnings.warn(f"load_checkpoint: {load_dir} has no file `{LATEST}`: nothing was loaded", stacklevel=2)
            return None, None
        objects = {} if load_module_only else self._objects()
        if not load_lr_scheduler_states:
            objects.pop("scheduler", None)
        if "loader" in objects and self._has_no_position(Path(load_dir), tag):
            objects.pop("loader")
        loaded = load_checkpoint(
            self.module,
            load_dir,
            tag=None if tag is None else str(tag),
            objects=objects,
            strict=load_module_strict,
            weights_only=load_module_only,
            optimizer_state=load_optimizer_states,
        )
        if "scheduler" in objects:
            self._set_rates(load_optimizer_states)
        self._after_load()
        return str(loaded.path), loaded.user_state

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's weights in the dtype it computes in, on rank 0: a plain state dict. Collective.

        A file of this name is replaced in one step, a link to one too: what it leads to stays as it is.

        Args:
            save_dir: folder; made if it does not exist.
            save_filename: a name that ends in ``.safetensors`` gets that format (tied names once), any other a file
                for ``torch.load``.
            exclude_frozen_parameters: leave out parameters that do not train.

        Returns:
            True.

        Raises:
            CheckpointError: rank 0 could not write it; the same on all ranks.
        """
        self._check_alive()
        check_tag(save_filename)
        state = full_state_dict(self.module, rank0_only=True, offload_to_cpu=True)
        if exclude_frozen_parameters:
            frozen = {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
            state = {name: tensor for name, tensor in state.items() if name not in frozen}
        problem = ""
        if self._is_first:
            try:
                _write_state(Path(save_dir).expanduser() / save_filename, state)
            except Exception as error:
                problem = describe(error)
        told = self._managed.settler.agreement.texts(problem, "save_16bit_model")[0]
        if told:
            raise CheckpointError(f"save_16bit_model: {told}")
        return True

    def _objects(self) -> dict[str, Stateful]:
        others = {"scheduler": self.lr_scheduler, "loader": self._loader}
        return {"engine": _Counters(self)} | {k: v for k, v in others.items() if hasattr(v, "state_dict")}

    def _set_rates(self, has_options: bool) -> None:
        """Let the optimizer's groups have the rates of the scheduler's place, which the next update shall have."""
        scheduler = self.lr_scheduler
        if isinstance(scheduler, ClosedForm):
            scheduler.set_rates()  # its options are those of now, not those of the save
        elif not has_options:
            groups = self.optimizer.param_groups if self.optimizer is not None else []
            last = getattr(scheduler, "get_last_lr", None)
            rates = last() if callable(last) else ()
            if len(rates) != len(groups):
                if self._is_first:
                    warnings.warn(
                        f"load_checkpoint: {type(scheduler).__name__} does not tell the rates of "
                        f"{len(groups)} groups: they keep those of now until it moves them",
                        stacklevel=3,
                    )
                return
            for group, rate in zip(groups, rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = float(rate)

    def _has_no_latest(self, folder: Path) -> bool:
        """Whether no rank sees the file; if some do, loading tells."""
        here = str(os.path.exists(os.path.join(os.path.expanduser(folder), LATEST)))
        return "True" not in self._managed.council.round("load_checkpoint (is there one?)", here)

    def _has_no_position(self, load_dir: Path, tag: str | None) -> bool:
        """Whether the checkpoint has no place in the data, as one that was imported; the loader then begins anew."""
        folder = Path(os.path.expanduser(load_dir))
        try:
            found = read_manifest(folder / resolve_tag(folder, None if tag is None else str(tag)))
        except ShardwiseError:
            return False  # loading tells what is wrong
        if "loader" in found.values.objects:
            return False
        if self._is_first:
            warnings.warn(
                "load_checkpoint: the checkpoint has no place in the data: the loader begins anew", stacklevel=3
            )
        return True


def _write_state(path: Path, state: Mapping[str, Tensor]) -> None:
    if path.suffix == ".safetensors":
        tensors = each_once(state)
        replace_file(path, lambda file: safetensors.torch.save_file(tensors, file, metadata={"format": "pt"}))
    else:
        replace_file(path, lambda file: torch.save(dict(state), file))
