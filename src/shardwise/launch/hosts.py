"""Starts one launcher per host of a hostfile by ssh, and nothing more.

Owns the grammar of hostfiles, the command of each host and the processes of ssh. Everything local is a list of
arguments; the one string is for the remote shell, and every word of it is quoted. A host's launcher ends when its
standard input does, so nothing stays behind when a connection is lost.
"""

import ipaddress
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from shardwise.environment import read_variables
from shardwise.errors import ConfigError

__all__ = ["FORWARDED", "Host", "forwarded_variables", "host_command", "parse_hostfile", "run_hosts"]

# All that a host gets of this environment without being asked for.
FORWARDED = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NO_COLOR",
    "OMP_NUM_THREADS",
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)(API_?|ACCESS_?|PRIVATE_?)?KEYS?($|_)")
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_LINE = re.compile(r"(\S+)[ \t]+slots=([1-9][0-9]{0,3})")
_GRACE_SECONDS = 5.0  # once one host has failed, for the others to notice by themselves
_END_SECONDS = 40.0  # then for their launchers to end their ranks, which takes up to 30
_REPORT = "The first to fail, "


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    name: str
    num_slots: int


def parse_hostfile(text: str, where: str = "hostfile") -> list[Host]:
    """Read lines of the form ``host slots=N``; empty lines and lines that begin with # are left out.

    A host is a DNS name or an IP address. Nothing else fits: no user, no options, no words after the number.

    Raises:
        ConfigError: names the line; hosts that occur twice are errors too.
    """
    hosts: dict[str, int] = {}
    found = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip(" \t\r")
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or not _is_host(match[1]):
            raise ConfigError(f"{where}, line {number}: expected `host slots=N`, got {line[:80]!r}")
        name = match[1].lower()
        if name in hosts:
            raise ConfigError(f"{where}, line {number}: host {match[1]!r} is in line {hosts[name]} already")
        hosts[name] = number
        found.append(Host(match[1], int(match[2])))
    if not found:
        raise ConfigError(f"{where}: no hosts; expected lines of the form `host slots=N`")
    return found


def _is_host(name: str) -> bool:
    if _HOST.fullmatch(name):
        return True
    try:
        return ipaddress.ip_address(name).version == 6 and "%" not in name
    except ValueError:
        return False


def forwarded_variables(names: Sequence[str]) -> dict[str, str]:
    """Return the variables that hosts get: the fixed list and ``names``, those that are set.

    Raises:
        ConfigError: a name is none, or looks like that of a secret; those are never sent.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--env {name!r}: a name has capitals, digits and underscores only")
        if _SECRET.search(name):
            raise ConfigError(f"--env {name}: looks like a secret, and those are not sent; set it on the hosts")
    return read_variables([*FORWARDED, *names])


def host_command(host: Host, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> list[str]:
    """Return the arguments of ssh that run ``words`` on a host, in ``folder``, with some more variables."""
    assignments = [f"{name}={value}" for name, value in sorted(variables.items())]
    prefix = ["env", *assignments] if assignments else []
    remote = f"cd {shlex.quote(folder)} && exec {shlex.join([*prefix, *words])}"
    return ["ssh", "-o", "BatchMode=yes", "--", host.name, remote]


def run_hosts(hosts: Sequence[Host], commands: Sequence[Sequence[str]]) -> int:
    """Run one command per host; return 0, or the exit status of the host that failed first.

    What hosts print is shown with the host before each line; the report of the first failure comes last. Signals end
    all of them, as in ``run_node``.

    Raises:
        ConfigError: there is no ssh here.
    """
    children: list[_Child] = []
    interrupted: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        interrupted.append(number)
        for child in children:
            child.end(kill=len(interrupted) > 1)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for host, command in zip(hosts, commands, strict=True):
            children.append(_Child(host.name, command))
        _wait(children)
    except FileNotFoundError as error:
        raise ConfigError(f"--hostfile: cannot run {commands[0][0]}: {error.strerror}") from error
    finally:
        for child in children:
            child.end(kill=True)
            child.join()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if interrupted:
        return 128 + interrupted[0]
    failed = [child for child in children if child.status != 0]
    if not failed:
        return 0
    first = min(failed, key=lambda child: child.failed_at)
    for child in sorted(failed, key=lambda child: child is first):
        sys.stderr.write(f"host {child.name} failed, exit code {child.status}\n")
    sys.stderr.write("\n".join(first.report) + ("\n" if first.report else ""))
    return first.status


def _wait(children: Sequence["_Child"]) -> None:
    """Wait for all; once one has failed or was ended, end the others after a while, then give up on them."""
    deadline, asked = float("inf"), False
    while any(child.process.poll() is None for child in children):
        time.sleep(0.05)
        if not asked and any(child.process.poll() or child.was_ended for child in children):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() < deadline:
            continue
        if asked:
            return
        for child in children:
            child.end()
        deadline, asked = time.monotonic() + _END_SECONDS, True


class _Child:
    """One ssh, and what it prints."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.report: list[str] = []  # from the line that names the first failing rank
        self.failed_at = float("inf")
        self.was_ended = False
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0
        )
        self._threads = [
            threading.Thread(target=self._pass_on, args=ends, daemon=True)
            for ends in ((self.process.stdout, sys.stdout.buffer), (self.process.stderr, sys.stderr.buffer))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def status(self) -> int:
        """Return the exit status as a shell gives it."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def end(self, *, kill: bool = False) -> None:
        """Close its standard input, on which the other end stops; or kill it."""
        if self.process.poll() is not None:
            return
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        self.was_ended = True
        if kill:
            self.process.kill()

    def join(self) -> None:
        """Wait for its end and for the last of what it printed."""
        self.process.wait()
        for thread in self._threads:
            thread.join(timeout=5.0)
        if self.process.returncode != 0:
            self.failed_at = min(self.failed_at, time.monotonic())
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()

    def _pass_on(self, source: IO[bytes], target: IO[bytes]) -> None:
        prefix = f"[{self.name}] ".encode()
        for line in iter(source.readline, b""):
            text = line.decode(errors="replace").rstrip("\r\n")
            if text.startswith(_REPORT):
                self.failed_at = time.monotonic()
                self.report = []
            if self.failed_at < float("inf") and source is self.process.stderr:
                self.report.append(text)
            try:
                target.write(prefix + line)
                target.flush()
            except OSError:  # nobody listens any more; the pipe must be read all the same
                continue
