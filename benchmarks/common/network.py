"""Network namespaces: one per rank, joined by a link that can be limited. Linux, root, ``ip`` and ``tc``.

Only names that begin with ``sw`` and this process's number are made, and only those are removed. The network of the
host is not touched: more than two ranks meet on a bridge in a namespace of its own.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INTERFACE = "bench0"


class NoNetworkError(RuntimeError):
    """This machine cannot make limited networks; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Where to start each rank, and the interface it must use."""

    namespaces: Sequence[str]
    rate: str | None

    def prefix(self, rank: int) -> list[str]:
        """Return what comes before the command of one rank."""
        return ["ip", "netns", "exec", self.namespaces[rank]]


def check_available() -> None:
    """Raise ``NoNetworkError`` where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise NoNetworkError("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNetworkError(f"{tool!r} (iproute2) is not installed")


@contextlib.contextmanager
def network(num_ranks: int, rate: str | None) -> Iterator[Network]:
    """Make a network of ``num_ranks`` hosts; each may send at ``rate`` (as ``tc`` writes it, "1gbit"; None: no limit).

    Raises:
        NoNetworkError: not root, tools are missing, or the kernel refuses.
    """
    check_available()
    base = f"sw{os.getpid()}"
    hosts, bridge = [f"{base}r{rank}" for rank in range(num_ranks)], f"{base}b"
    made: list[str] = []
    try:
        for name in [*hosts, bridge]:
            _run("ip", "netns", "add", name)
            made.append(name)
        _in(bridge, "ip", "link", "add", "br0", "type", "bridge")
        _in(bridge, "ip", "link", "set", "br0", "up")
        for rank, host in enumerate(hosts):
            port = f"port{rank}"
            _run("ip", "link", "add", INTERFACE, "netns", host, "type", "veth", "peer", "name", port, "netns", bridge)
            _in(bridge, "ip", "link", "set", port, "master", "br0", "up")
            _in(host, "ip", "link", "set", "lo", "up")
            _in(host, "ip", "address", "add", f"10.99.0.{rank + 1}/24", "dev", INTERFACE)
            _in(host, "ip", "link", "set", INTERFACE, "up")
            if rate is not None:
                limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
                _in(host, "tc", "qdisc", "add", "dev", INTERFACE, "root", *limit)
        yield Network(namespaces=hosts, rate=rate)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _in(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoNetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
