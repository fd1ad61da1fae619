"""How the nodes of a job meet: torch's ways, and one of our own for a job that needs no other node.

Torch's stores listen on every address of a machine. A job of one node has no need of that: its store listens on the
loopback address, on a free port. Read ``node.py`` for who uses it.
"""

import socket
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from shardwise.environment import set_default
from shardwise.errors import ConfigError
from shardwise.launch.options import LaunchOptions

__all__ = ["OneNodeRendezvous", "make_rendezvous", "stay_on_loopback"]

_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500
_RENDEZVOUS_SECONDS = 900


class OneNodeRendezvous(RendezvousHandler):
    """The rendezvous of a job with one node: a store that listens on the loopback address only."""

    def __init__(self, run_id: str, port: int | None) -> None:
        self._run_id = run_id
        self._count = 0
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((_LOOPBACK, port or 0))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise ConfigError(f"--master-port {port}: {error.strerror}; leave it out to take a free port") from error
        self.port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=_RENDEZVOUS_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks meet in this store too."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "shardwise-one-node"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the only node's place."""
        self._count += 1
        store = dist.PrefixStore(f"{self._run_id}/{self._count}", self._store)  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self.port))

    def is_closed(self) -> bool:
        """Return False: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let go of the store."""
        return True


def make_rendezvous(options: LaunchOptions) -> tuple[RendezvousHandler, str | None, int | None]:
    """Return how the nodes meet, and for the static way where the ranks do."""
    run_id = options.run_id or uuid.uuid4().hex
    if options.alone:
        return OneNodeRendezvous(run_id, options.master_port), None, None
    settings: dict[str, Any] = {"timeout": _RENDEZVOUS_SECONDS, **dict(options.rendezvous_options)}
    endpoint = options.rendezvous_endpoint
    if options.rendezvous_backend == "static":
        settings["rank"] = options.node_rank
        endpoint = endpoint or f"{options.master_addr}:{options.master_port or _DEFAULT_PORT}"
        run_id = options.run_id or "none"  # as torchrun: equal on all nodes
    try:
        params = RendezvousParameters(
            options.rendezvous_backend,
            endpoint or f"{_LOOPBACK}:0",
            run_id,
            options.min_nodes,
            options.max_nodes,
            options.local_addr,
            **settings,
        )
        handler = get_rendezvous_handler(params)
        if options.rendezvous_backend != "static":
            return handler, None, None
        address, port = parse_rendezvous_endpoint(endpoint, default_port=_DEFAULT_PORT)
    except (ValueError, RendezvousError) as error:
        raise ConfigError(f"rendezvous {options.rendezvous_backend} at {endpoint or 'no endpoint'}: {error}") from error
    return handler, address, port


def stay_on_loopback() -> None:
    """Keep gloo off the network, unless the environment says otherwise."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            set_default("GLOO_SOCKET_IFNAME", name)
