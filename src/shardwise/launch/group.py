"""Join the process group that a launcher (``shardwise launch``, ``torchrun``) prepared in the environment."""

from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.environment import Environment

__all__ = ["join_group", "leave_group"]


def join_group(environment: Environment, device_type: str, timeout: float | None = None) -> bool:
    """Make the default process group if a launcher set the environment for one and nobody made it yet.

    Args:
        environment: what the launcher set.
        device_type: "cuda" takes NCCL (and the device of the local rank), everything else gloo.
        timeout: seconds that a collective may wait; None: torch's default.

    Returns:
        Whether a group was made; whoever asked for it leaves it with ``leave_group``.
    """
    if not dist.is_available() or dist.is_initialized():
        return False
    if environment.rank is None or environment.world_size is None:
        return False
    if device_type == "cuda":
        torch.cuda.set_device(environment.local_rank or 0)
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=limit)
    return True


def leave_group() -> None:
    """Leave the default process group; nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
