"""``shardwise launch``: options, environment and logs of the ranks, failures, signals, hosts.

Where it can, a test runs the command in this process; its ranks are real processes that need no torch, so that each
takes a fraction of a second.
"""

import gc
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli.main import app
from shardwise.errors import ConfigError
from shardwise.launch import hosts as hosts_module
from shardwise.launch.failure import RankEnd, describe_failure, exit_status, first_to_fail
from shardwise.launch.hosts import FORWARDED, Host, forwarded_variables, host_command, parse_hostfile
from shardwise.launch.options import LaunchOptions, count_processes, parse_ranks, parse_streams
from shardwise.launch.streams import Line

pytestmark = pytest.mark.timeout(120)

PROGRAM = [sys.executable, "-m", "shardwise.cli"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder of our own, and let go of the variables that the command sets for its children."""
    monkeypatch.chdir(tmp_path)
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, {"GLOO_SOCKET_IFNAME": "lo"}.get(name, "1")))
    return tmp_path


def script(text: str, name: str = "script.py") -> str:
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
    return name


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["launch", *arguments])


def logs(folder: str = "logs") -> dict[str, str]:
    """Return the logs of the only run, by file name."""
    (run_folder,) = Path(folder).iterdir()
    return {path.name: path.read_text() for path in run_folder.iterdir()}


# Options


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "0"], "--nproc-per-node must be a number from 1 on, auto, cpu or gpu, got '0'"),
        (["-n", "two"], "got 'two'"),
        (["--nnodes", "x"], "--nnodes: expected N or MIN:MAX, got 'x'"),
        (["--nnodes", "0"], "--nnodes: expected N, or MIN:MAX"),
        (["--nnodes", "3:2"], "--nnodes: expected N, or MIN:MAX"),
        (["--nnodes", "1:2"], "--nnodes MIN:MAX needs --rdzv-backend c10d"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank must be from 0 to 1"),
        (["--nnodes", "2", "--rdzv-backend", "c10d"], "needs --rdzv-endpoint"),
        (["--rdzv-backend", "nothing", "--rdzv-endpoint", "127.0.0.1:1"], "rendezvous nothing at 127.0.0.1:1"),
        (["--rdzv-conf", "a"], "--rdzv-conf: expected KEY=VALUE"),
        (["--master-port", "70000"], "--master-port must be from 1 to 65535"),
        (["-n", "2", "--local-ranks-filter", "7"], "--local-ranks-filter: this node has local ranks 0 to 1, not 7"),
        (["--local-ranks-filter", "0,1,2"], "--local-ranks-filter: this node has local rank 0 only, not 1, 2"),
        (["--max-restarts", "-1"], "--max-restarts must be at least 0"),
        (["-r", "4"], "--redirects must be 0, 1, 2, 3 or a list like 0:3,1:2"),
        (["-t", "0:3,1"], "--tee must be"),
        (["--local-ranks-filter", "0;1"], "--local-ranks-filter must be"),
        (["-m", "--no-python"], "exclude each other"),
        (["--standalone", "--nnodes", "2"], "--standalone is one node by itself"),
        (["--hostfile", "hosts", "-n", "2"], "--hostfile says what runs where; leave out --nproc-per-node"),
        (["--hostfile", "hosts"], "--hostfile hosts:"),
        (["--env", "X"], "--env is for --hostfile"),
    ],
)
def test_wrong_option_is_refused_before_anything_starts(arguments: list[str], complaint: str) -> None:
    result = run(*arguments, script("print('started')"))
    assert isinstance(result.exception, ConfigError), result.output
    assert complaint in str(result.exception)
    assert "started" not in result.output


def test_number_of_processes_follows_the_machine() -> None:
    assert count_processes("7") == 7
    assert count_processes("cpu") == len(os.sched_getaffinity(0))
    assert count_processes("auto") >= 1


def test_streams_shown_follow_redirects_tee_and_filter() -> None:
    def shown(rank: int, **options: str) -> str:
        found = LaunchOptions(
            command=("x",),
            num_local_ranks=2,
            redirects=parse_streams(options.get("r", "0"), "-r"),
            tee=parse_streams(options.get("t", "0"), "-t"),
            local_ranks_shown=parse_ranks(options.get("f", "")),
        ).streams_shown(rank)
        return " ".join(sorted(found))

    assert shown(0) == "stderr stdout"
    assert shown(0, r="1") == "stderr"
    assert shown(0, r="3") == ""
    assert shown(0, r="3", t="1") == "stdout"
    assert (shown(0, r="0:3,1:2"), shown(1, r="0:3,1:2"), shown(2, r="0:3,1:2")) == ("", "stdout", "stderr stdout")
    assert (shown(0, f="1"), shown(1, f="1")) == ("", "stderr stdout")


def test_filter_of_ranks_that_only_other_nodes_may_have_is_told() -> None:
    name = script("print('started')")
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nnodes", "1:2")
    result = run(*place, "--rdzv-conf", "last_call_timeout=1", "--local-ranks-filter", "7", name)
    assert result.exit_code == 0, result.output
    assert "--local-ranks-filter: none of these ranks is on this node" in result.output
    assert "started" not in result.output
    assert logs() == {"rank-0.log": "started\n"}


# One node


def test_ranks_know_their_place_and_get_the_arguments() -> None:
    name = script(
        """
        import os, sys
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        print(*[os.environ[name] for name in names], *sys.argv[1:])
        """
    )
    result = run("-n", "2", name, "--lr", "0.1", "-n", "5", "a b", "")
    assert result.exit_code == 0, result.output
    assert logs() == {f"rank-{rank}.log": f"{rank} 2 {rank} 2 127.0.0.1 1 --lr 0.1 -n 5 a b \n" for rank in range(2)}
    for log in logs().values():
        assert log in result.output
    assert re.search(r"^logs of the ranks: logs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d$", result.output, re.MULTILINE)


def test_underscores_modules_and_programs_work_as_in_torchrun(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    script("import sys; print(sys.argv[1:], __name__)", "package/part.py")
    assert "['x'] __main__" in run("--nproc_per_node", "1", "--log_dir", "a", "-m", "package.part", "x").output
    assert "hello" in run("--log-dir", "b", "--no_python", "echo", "hello").output
    assert logs("b") == {"rank-0.log": "hello\n"}


def test_store_of_the_ranks_listens_on_the_loopback_address_only() -> None:
    name = script(
        """
        import os
        port = f"{int(os.environ['MASTER_PORT']):04X}"
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            for line in open(table).read().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[1].endswith(":" + port):
                    print("listens", fields[1].partition(":")[0])
        """
    )
    result = run(name)
    assert result.output.splitlines()[1:] == ["listens 0100007F"]


def test_port_asked_for_is_used_and_a_taken_one_is_an_error() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        result = run("--master-port", port, script("print('started')"))
        assert isinstance(result.exception, ConfigError)
        assert f"--master-port {port}" in str(result.exception)
    result = run("--master-port", port, script("import os; print(os.environ['MASTER_PORT'])"))
    assert result.output.splitlines()[-1] == port


def test_streams_of_a_rank_share_its_log_and_the_console_shows_what_was_asked_for() -> None:
    name = script(
        """
        import os, sys
        for number in range(3):
            print("out", number, flush=True)
            print("err", number, file=sys.stderr, flush=True)
        sys.stdout.write("no end of line")
        """
    )
    result = run("-n", "2", "-r", "3", "-t", "1:1", name)
    for rank in range(2):
        log = logs()[f"rank-{rank}.log"]
        assert sorted(log.splitlines()) == sorted(
            [f"{s} {n}" for n in range(3) for s in ("out", "err")] + ["no end of line"]
        )
    assert result.output.splitlines()[1:] == [
        "[rank 1] out 0",
        "[rank 1] out 1",
        "[rank 1] out 2",
        "[rank 1] no end of line",
    ]


FAILING = """
    import os, sys, time
    rank = int(os.environ["RANK"])
    if rank == 1:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("the cause") from error
    while not os.path.exists("failed"):
        time.sleep(0.01)
        if any("the cause" in open(os.path.join(d, f)).read() for d, _, fs in os.walk("logs") for f in fs):
            raise RuntimeError("a consequence")
"""


def test_traceback_of_the_first_to_fail_comes_last_with_its_rank() -> None:
    result = run("-n", "2", script(FAILING))
    assert result.exit_code == 1
    report = result.output[result.output.index("The first to fail, ") :]
    assert re.match(r"The first to fail, rank 1: exit code 1, log logs/[\d_-]+/rank-1.log\n", report)
    assert report.splitlines()[1] == "Traceback (most recent call last):"
    assert "KeyError: 'missing'" in report
    assert report.endswith("ValueError: the cause\n")
    assert "a consequence" not in report


@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.abort()", 134, "killed by SIGABRT"),
    ],
)
def test_exit_status_is_that_of_the_failing_rank(ending: str, status: int, reason: str) -> None:
    name = script(
        f"""
        import os, signal, sys, time
        print("before the end", flush=True)
        if os.environ["RANK"] == "0":
            {ending}
        time.sleep(60)
        """
    )
    started = time.monotonic()
    result = run("-n", "2", name)
    assert time.monotonic() - started < 20
    assert result.exit_code == status
    last = result.output.splitlines()[-2:]
    assert last[0].startswith(f"The first to fail, rank 0: {reason}, log ")
    assert last[1] == "before the end"
    assert "rank 1 ended after that: killed by SIGTERM" in result.output


def test_ranks_start_again_as_often_as_asked() -> None:
    name = script(
        """
        import os, sys
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("start", restart)
        sys.exit(restart < 2)
        """
    )
    assert run("--max-restarts", "2", "--monitor-interval", "0.02", name).exit_code == 0
    assert logs() == {
        "rank-0.log": "start 0\n",
        "rank-0.restart-1.log": "start 1\n",
        "rank-0.restart-2.log": "start 2\n",
    }
    result = run("--max-restarts", "1", "--log-dir", "again", "--monitor-interval", "0.02", name)
    assert result.exit_code == 1
    assert result.output.endswith("rank-0.restart-1.log\nstart 1\n")


def test_every_run_has_a_folder_of_its_own_and_leaves_no_other() -> None:
    before = set(Path(tempfile.gettempdir()).glob("shardwise-launch-*"))
    for _ in range(3):
        assert run(script("print(1)")).exit_code == 0
    assert len(list(Path("logs").iterdir())) == 3
    assert set(Path(tempfile.gettempdir()).glob("shardwise-launch-*")) <= before


def test_log_folder_that_cannot_be_made_is_an_error() -> None:
    Path("logs").write_text("a file")
    result = run(script("print('started')"))
    assert isinstance(result.exception, ConfigError)
    assert "--log-dir logs" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["no-such.py"], "there is no script 'no-such.py'"),
        (["--no-python", "no-such"], "there is no program 'no-such'"),
    ],
)
def test_missing_script_is_named_before_anything_starts(arguments: list[str], complaint: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert complaint in str(result.exception)
    assert not Path("logs").exists()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torch's, of a process that was never started
def test_program_that_cannot_be_started_is_named(place: Path) -> None:
    program = place / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o700)
    result = run("--no-python", str(program))
    assert isinstance(result.exception, ConfigError)
    assert f"cannot start {program}" in str(result.exception)
    del result
    gc.collect()


def test_real_ranks_meet_over_gloo() -> None:
    name = script(
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        print("sum", x.item())
        dist.destroy_process_group()
        """
    )
    result = run("-n", "2", name)
    assert result.exit_code == 0, result.output
    assert logs() == {"rank-0.log": "sum 3.0\n", "rank-1.log": "sum 3.0\n"}


# Which rank failed first

WAITED = ["Traceback (most recent call last):", "ConnectionError: lost"]


def end(rank: int, code: int, seconds: float, stderr: list[str] | None = None, at: float = 0.0) -> RankEnd:
    lines = [Line(at, "stderr", text) for text in stderr or []]
    return RankEnd(rank=rank, exit_code=code, seconds=seconds, lines=lines, log=Path(f"rank-{rank}.log"))


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([end(0, 1, 2.0, WAITED, 1.9), end(1, 1, 2.5, WAITED, 1.0)], 1),  # by its traceback, though it left later
        ([end(0, 1, 2.0, WAITED, 1.9), end(1, 3, 1.5)], 1),  # without a traceback
        ([end(0, 1, 2.0, WAITED, 1.9), end(1, -9, 1.5)], 1),  # killed
        ([end(0, 1, 2.0, WAITED, 1.0), end(1, -9, 31.0)], 0),  # killed by the launcher's patience
        ([end(0, -15, 2.1), end(1, 1, 2.0, WAITED, 1.0)], 1),  # ended by the launcher
        ([end(0, 1, 2.0, WAITED, 1.9), end(1, -15, 2.5, WAITED, 1.8)], 1),  # ended by the launcher on its way out
        ([end(0, 1, 60.0, WAITED, 59.0), end(1, -15, 60.5, WAITED, 10.0)], 0),  # an old traceback that was caught
        ([end(0, 1, 60.0, WAITED, 59.0), end(1, 3, 60.5, WAITED, 10.0)], 0),
        ([end(0, -15, 2.0), end(1, -15, 1.0)], 1),
    ],
)
def test_first_to_fail_is_told_from_its_victims(ends: list[RankEnd], first: int) -> None:
    assert first_to_fail(ends).rank == first_to_fail(ends[::-1]).rank == first


HANDLED = ["Traceback (most recent call last):", "  File x", "ValueError: handled"]
OWN = ["Traceback (most recent call last):", "KeyError: 'own'"]
DOWN = [f"[rank1]: {text}" for text in (HANDLED[0], "  File x", "ValueError: two", "lines")]


@pytest.mark.parametrize(
    ("ends", "first", "status"),
    [
        ([end(0, -15, 2.5, HANDLED, 1.0), end(1, 1, 2.0, OWN, 1.9)], 1, 1),  # nobody needs a peer for a KeyError
        ([end(0, -15, 2.5, [*HANDLED, "going on"], 1.0), end(1, 1, 2.0, WAITED, 1.9)], 1, 1),  # it lived on
        ([end(0, 7, 2.0, OWN, 1.9), end(1, -15, 2.5, DOWN, 1.8)], 0, 7),
        ([end(0, 7, 2.0, WAITED, 1.9), end(1, -15, 2.5, DOWN, 1.8)], 1, 1),
        ([end(0, 7, 2.0, WAITED, 1.9), end(1, -15, 2.5, [*DOWN, "[rank1]:[W1] not destroyed"], 1.8)], 1, 1),
        ([end(0, 7, 2.0, WAITED, 1.9), end(1, -15, 2.5, HANDLED, 1.8), end(2, -15, 2.5, HANDLED, 1.0)], 2, 1),
        ([end(0, 1, 60.0, WAITED, 59.0), end(1, -15, 60.5, HANDLED, 10.0)], 0, 1),
        ([end(0, -15, 2.0), end(1, -15, 1.0)], 1, 143),  # nobody but the launcher's caller can have sent the first
    ],
)
def test_rank_that_the_launcher_ended_is_first_only_if_another_missed_it(
    ends: list[RankEnd], first: int, status: int
) -> None:
    for order in (ends, ends[::-1]):
        assert (first_to_fail(order).rank, exit_status(order)) == (first, status)


def test_line_on_stdout_after_a_traceback_shows_that_it_was_handled() -> None:
    missed = end(0, 1, 2.0, WAITED, 1.9)
    ended = end(1, -15, 2.5, HANDLED, 1.0)
    assert first_to_fail([missed, ended]).rank == 1
    living = replace(ended, lines=[*ended.lines, Line(1.5, "stdout", "step 2")])
    assert first_to_fail([missed, living]).rank == 0
    before = replace(ended, lines=[Line(0.5, "stdout", "step 1"), *ended.lines])
    assert first_to_fail([missed, before]).rank == 1


def test_report_says_that_the_first_to_fail_was_on_its_way_out() -> None:
    report = describe_failure([end(0, 1, 2.0, WAITED, 1.9), end(1, -15, 2.5, DOWN, 1.8)]).splitlines()
    assert report[:2] == [
        "rank 0 ended after that: exit code 1, log rank-0.log",
        "The first to fail, rank 1: the traceback below, ended by the launcher on its way out, log rank-1.log",
    ]


def test_handled_traceback_of_a_healthy_rank_is_not_the_failure() -> None:
    name = script(
        """
        import os, time, traceback
        if os.environ["RANK"] == "0":
            try:
                1 / 0
            except ZeroDivisionError:
                traceback.print_exc()
            open("handled", "w").close()
            time.sleep(60)
        while not os.path.exists("handled"):
            time.sleep(0.01)
        time.sleep(0.5)
        raise KeyError("the real one")
        """
    )
    result = run("-n", "2", name)
    assert result.exit_code == 1
    report = result.output[result.output.index("The first to fail, ") :]
    assert report.startswith("The first to fail, rank 1: exit code 1, log ")
    assert report.endswith("KeyError: 'the real one'\n")


def test_report_keeps_chains_of_causes_and_drops_earlier_tracebacks() -> None:
    stderr = [
        "Traceback (most recent call last):",
        "OSError: caught and logged",
        "[rank0]: Traceback (most recent call last):",
        "[rank0]: KeyError: 1",
        "",
        "[rank0]: During handling of the above exception, another exception occurred:",
        "",
        "[rank0]: Traceback (most recent call last):",
        "[rank0]:   File x",
        "[rank0]: ValueError: 2",
    ]
    report = describe_failure([end(0, 1, 1.0, stderr)]).splitlines()
    assert report[0] == "The first to fail, rank 0: exit code 1, log rank-0.log"
    assert report[1:3] == ["Traceback (most recent call last):", "KeyError: 1"]
    assert report[-2:] == ["  File x", "ValueError: 2"]
    assert "OSError: caught and logged" not in report


def test_exit_status_is_that_of_a_shell() -> None:
    assert [exit_status([end(0, code, 1.0)]) for code in (1, 77, -9, -15)] == [1, 77, 137, 143]


# Signals


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def written(what: str, count: int) -> list[int]:
    """Wait until ``count`` numbers stand behind ``what`` in the logs, and return them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in Path("logs").glob("*/*.log")]
        found = [int(number) for text in texts for number in re.findall(rf"{what} (\d+)\n", text)]
        if len(found) == count:
            return found
        time.sleep(0.01)
    raise TimeoutError(what)


def in_background(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


SLEEPING = "import os, time; print('pid', os.getpid(), flush=True); [time.sleep(1) for _ in range(100)]"
DEAF = "import signal; signal.signal(signal.SIGINT, lambda *_: print('heard', 1, flush=True))\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_ends_all_ranks_and_shows_in_the_status(number: signal.Signals, status: int) -> None:
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(written("pid", 2))
        os.kill(os.getpid(), number)

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    thread = in_background(interrupt)
    assert run("-n", "2", script(SLEEPING)).exit_code == status
    thread.join()
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_second_signal_kills_ranks_that_do_not_listen() -> None:
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(written("pid", 1))
        os.kill(os.getpid(), signal.SIGINT)
        written("heard", 1)
        assert is_running(pids[0])
        os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    thread = in_background(interrupt)
    assert run(script(DEAF + SLEEPING)).exit_code == 130
    thread.join()
    assert time.monotonic() - started < 25  # the agent alone would wait for 30
    assert not any(map(is_running, pids))


def test_program_of_its_own_ends_its_ranks_too() -> None:
    process = subprocess.Popen(
        [*PROGRAM, "launch", "-n", "2", script(SLEEPING)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        pids = written("pid", 2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143
    assert not any(map(is_running, pids))
    assert output.count("\n") == 3  # where the logs are, and what the ranks print


# Hosts

HOSTILE = [
    "-oProxyCommand=id slots=2",
    "--help slots=1",
    "host",
    "host slots=",
    "host slots=0",
    "host slots=-1",
    "host slots=2 extra",
    "host slots=2; id",
    "host slots=2 # two",
    "host slots=two",
    "host slots=99999",
    "user@host slots=2",
    "host,other slots=2",
    "ho$(id)st slots=2",
    "host`id` slots=2",
    "host. slots=2",
    ".host slots=2",
    "host/path slots=2",
    "h\u00f6st slots=2",
    "fe80::1%eth0 slots=2",
    "1:2:3 slots=2",
    "host\x00 slots=2",
    "host slots=2\x0bslots=3",
]


@pytest.mark.parametrize("line", HOSTILE)
def test_hostile_line_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(ConfigError, match=r"hosts.txt, line 3: expected `host slots=N`"):
        parse_hostfile(f"good slots=1\n\n{line}\n", "hosts.txt")


def test_hostfile_holds_names_and_addresses() -> None:
    text = "# ours\n\nnode-1.example.org slots=8\r\n10.0.0.7\tslots=4\n  n_2 slots=1\n2001:db8::1 slots=16"
    assert parse_hostfile(text) == [
        Host("node-1.example.org", 8),
        Host("10.0.0.7", 4),
        Host("n_2", 1),
        Host("2001:db8::1", 16),
    ]


def test_host_that_comes_twice_and_a_file_without_hosts_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"line 3: host 'NODE' is in line 1 already"):
        parse_hostfile("node slots=1\nother slots=1\nNODE slots=2\n")
    with pytest.raises(ConfigError, match="no hosts"):
        parse_hostfile("# nothing\n")


NASTY = {"A": "it's", "B": '"$(touch made)`touch made`"', "C": "two\nlines", "D": " ; touch made &", "E": "\\ * ~ !x"}


def test_words_and_values_arrive_on_the_host_as_they_are(tmp_path: Path) -> None:
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], [os.environ[n] for n in 'ABCDE'], os.getcwd()]))"
    folder = tmp_path / "a folder; with 'quotes'"
    folder.mkdir()
    words = [sys.executable, "-c", show, *NASTY.values(), "", "-x"]
    command = host_command(Host("node", 1), words, str(folder), NASTY)
    assert command[:5] == ["ssh", "-o", "BatchMode=yes", "--", "node"]
    assert len(command) == 6
    done = subprocess.run(["/bin/sh", "-c", command[5]], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout) == [[*NASTY.values(), "", "-x"], list(NASTY.values()), str(folder)]
    assert not list(tmp_path.rglob("made"))


def test_only_listed_variables_are_sent_and_never_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FORWARDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MY_SETTING", "a b")
    monkeypatch.setenv("PYTHONSTARTUP", "x")
    assert forwarded_variables([]) == {"NCCL_DEBUG": "INFO"}
    assert forwarded_variables(["MY_SETTING", "NOT_SET_ANYWHERE"]) == {"NCCL_DEBUG": "INFO", "MY_SETTING": "a b"}
    for name in (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "SSH_KEY",
        "APIKEY",
        "MY_CREDENTIALS",
    ):
        monkeypatch.setenv(name, "secret")
        with pytest.raises(ConfigError, match="looks like a secret"):
            forwarded_variables([name])
    for name in ("lower", "A B", "A=1", "", "-A", "$A", "A\n"):
        with pytest.raises(ConfigError, match="capitals, digits and underscores"):
            forwarded_variables([name])
    assert forwarded_variables(["MONKEY", "KEYBOARD_LAYOUT"]) == {"NCCL_DEBUG": "INFO"}


@pytest.fixture
def fake_ssh(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an ``ssh`` first on the path that notes its arguments and runs the command here; return where it notes."""
    folder, notes = place / "bin", place / "notes"
    folder.mkdir()
    notes.mkdir()
    program = folder / "ssh"
    lines = ["#!/bin/sh", f'printf "%s\\0" "$@" > {shlex.quote(str(notes))}/"$4"', 'exec /bin/sh -c "$5"', ""]
    program.write_text("\n".join(lines))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return notes


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_hosts_form_one_job_and_the_failing_rank_is_reported_last(
    fake_ssh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "_GRACE_SECONDS", 0.5)
    Path("hosts").write_text("one slots=1\ntwo slots=2\n")
    name = script(
        """
        import os, sys, time
        rank = int(os.environ["RANK"])
        print("rank", rank, "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
        if rank == 2:
            time.sleep(0.5)
            raise ValueError("on the second host")
        time.sleep(60)
        """
    )
    place = ["--hostfile", "hosts", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    started = time.monotonic()
    result = run(*place, name, "it's", "$(x)")
    assert time.monotonic() - started < 50  # the first host's rank would sleep longer
    assert result.exit_code == 1, result.output
    assert "[one] rank 0 of 3 it's $(x)" in result.output
    assert "[two] rank 2 of 3 it's $(x)" in result.output
    assert "host one failed, exit code 143" in result.output
    report = result.output[result.output.rindex("host two failed, exit code 1\n") :].splitlines()
    assert report[1].startswith("The first to fail, rank 2: exit code 1, log ")
    assert report[2] == "Traceback (most recent call last):"
    assert report[-1] == "ValueError: on the second host"
    assert sorted(note.name for note in fake_ssh.iterdir()) == ["one", "two"]
    noted = (fake_ssh / "two").read_text().split("\0")
    assert noted[:4] == ["-o", "BatchMode=yes", "--", "two"]
    assert len(noted) == 6  # the command, and nothing behind its end
    assert shlex.quote("it's") in noted[4]


def test_host_that_cannot_be_reached_ends_the_job(fake_ssh: Path) -> None:
    program = fake_ssh.parent / "bin" / "ssh"
    program.write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
    Path("hosts").write_text("one slots=1\n")
    result = run("--hostfile", "hosts", script("print('started')"))
    assert result.exit_code == 255
    assert "[one] no route to host" in result.output
    assert "host one failed, exit code 255" in result.output


def test_missing_ssh_is_named(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setenv("PATH", str(place))
    Path("hosts").write_text("one slots=1\n")
    result = run("--hostfile", "hosts", script("print('started')"))
    assert isinstance(result.exception, ConfigError)
    assert "cannot run ssh" in str(result.exception)
