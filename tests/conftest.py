"""Shared by all tests: one thread per process, and a plain account of what did not run.

A test that needs something a machine may lack says so with a marker: ``needs_root``, ``needs_disk(mib)`` or
``needs_peer(name)``. It is then skipped with a reason. The last line of a session is the number of tests that did not
run, after one line per reason.
"""

import importlib.util
import os
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch

# Child processes of a test inherit these. A shell starts background jobs with SIGINT ignored, nohup too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MIB = 1 << 20


def missing_need(item: pytest.Item) -> str | None:
    """Return why this machine cannot run the test, or None."""
    if item.get_closest_marker("needs_root") and os.geteuid() != 0:
        return "needs root"
    for mark in item.iter_markers("needs_disk"):
        (mib,) = mark.args
        if shutil.disk_usage(tempfile.gettempdir()).free < mib * MIB:
            return f"needs {mib} MiB of free disk"
    for mark in item.iter_markers("needs_peer"):
        (name,) = mark.args
        if importlib.util.find_spec(name) is None:
            return f"needs the optional package {name}"
    return None


class NotRun:
    """Counts the tests that were left out, by reason; where workers run the tests, each tells what it left out."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.deselected: Counter[str] = Counter()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            large = item.get_closest_marker("matrix") is not None
            self.deselected["large matrix (make test-all)" if large else "deselected by the command line"] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["deselected"] = dict(self.deselected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.deselected |= Counter(getattr(node, "workeroutput", {}).get("deselected", {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._count(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._count(report)

    def _count(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.reasons[reason.removeprefix("Skipped: ")] += 1

    def lines(self) -> Iterator[str]:
        reasons = self.reasons + self.deselected
        for reason, count in sorted(reasons.items()):
            yield f"not run: {count:5d}  {reason}"
        yield f"tests that did not run: {reasons.total()}"


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    config.pluginmanager.register(NotRun(), "not-run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = missing_need(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


# Later than the terminal summary, whose own last line would otherwise close the session.
@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    not_run = config.pluginmanager.get_plugin("not-run")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not_run is not None and reporter is not None and not config.option.collectonly:
        for line in not_run.lines():
            reporter.write_line(line)
