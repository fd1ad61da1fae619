"""Our checkpoint to torch.distributed.checkpoint's own format, for whoever has torch only. One tensor in memory."""

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.doors.dcp_names import Leaf, leaves_of
from shardwise.checkpoint.doors.outgoing import Outgoing, new_directory, seen
from shardwise.errors import CheckpointError

__all__ = ["export_dcp"]


def export_dcp(path: Path, target: Path, *, verify: bool = True) -> Path:
    """Write a checkpoint as ``dcp.save`` would write ``get_state_dict(model, optimizer)``.

    Keys are ``model.<name>``, ``optim.state.<name>.<state>`` and ``optim.param_groups.<number>.<option>``; parameters
    are as the optimizer keeps them. Random generators are left out.

    Args:
        path: directory of the checkpoint.
        target: new directory; it appears whole or not at all.
        verify: check the hash of every tensor first.

    Raises:
        CheckpointError: the checkpoint is damaged, ``target`` exists, or cannot be written.
    """
    with Outgoing(path, verify=verify) as outgoing:
        leaves = leaves_of(outgoing.manifest, str(path))
        with new_directory(target) as folder, _as_checkpoint_error(target):
            save(
                _nested(leaves),
                storage_writer=_OneByOne(folder),
                planner=_LazyPlanner(leaves, outgoing),
                no_dist=True,
            )
    return target


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors that have no values, and reads each when it is written."""

    def __init__(self, leaves: dict[str, Leaf], outgoing: Outgoing) -> None:
        super().__init__()
        self._leaves = leaves
        self._outgoing = outgoing

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value behind a key."""
        leaf = self._leaves[index.fqn]
        return leaf.value if leaf.stored is None else self._outgoing.read_stored(leaf.stored)


class _OneByOne(FileSystemWriter):
    """Torch's writer, but for its habit to hold all tensors of a file until the file is closed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items to one file."""
        name = "__0_0.distcp"
        results = []
        with open(os.path.join(self.path, name), "xb") as stream:
            for item in plan.items:
                offset = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    torch.save(data.detach(), stream)
                num_bytes = stream.tell() - offset
                results.append(
                    WriteResult(
                        index=item.index, size_in_bytes=num_bytes, storage_data=_StorageInfo(name, offset, num_bytes)
                    )
                )
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _nested(leaves: dict[str, Leaf]) -> dict[str, Any]:
    """Build the nested state dict, with tensors on the meta device."""
    top: dict[str, Any] = {"model": {}, "optim": {"state": {}, "param_groups": []}}
    groups: list[dict[str, Any]] = top["optim"]["param_groups"]
    for leaf in leaves.values():
        value = leaf.value
        if leaf.stored is not None:
            shape, dtype = seen(leaf.stored)
            value = torch.empty(shape, dtype=dtype, device="meta")
        match leaf.path:
            case ("optim", "state", name, state):
                top["optim"]["state"].setdefault(name, {})[state] = value
            case ("optim", "param_groups", int(number), option):
                groups += [{} for _ in range(number + 1 - len(groups))]
                groups[number][str(option)] = value
            case ("model", name):
                top["model"][name] = value
            case _:
                top[leaf.key] = value
    return top if groups else {key: value for key, value in top.items() if key != "optim"}


@contextlib.contextmanager
def _as_checkpoint_error(target: Path) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except (CheckpointError, OSError):
        raise
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, CheckpointError | OSError):
            raise first from None
        raise CheckpointError(f"{target} was not written: {first}") from None
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{target} was not written: {error}") from None
