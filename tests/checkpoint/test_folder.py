"""The folder of checkpoints: things that are no files, names that lead elsewhere, leftovers, saves cut off anywhere."""

import ctypes
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.checkpoint import folder as folder_module
from shardwise.checkpoint import manifest as manifest_module
from shardwise.checkpoint import save as save_module
from shardwise.checkpoint.doors.outgoing import find_checkpoint
from shardwise.checkpoint.folder import clear_leftovers, commit, make_temporary, read_latest, write_latest
from shardwise.checkpoint.names import MANIFEST, read_small
from shardwise.checkpoint.verify import verify_files
from shardwise.comm.base import Comm
from shardwise.comm.fake import LocalComm
from shardwise.errors import CheckpointError
from shardwise.testing.ranks import run_ranks

from .case import assert_same, build, state_of, train, tree

SAVE_ID = "0123456789abcdef" * 2
WORKER = Path(__file__).with_name("kill_any_time.py")


def make_link(path: Path, away: Path) -> None:
    path.symlink_to(away)


def make_dangling_link(path: Path, away: Path) -> None:
    path.symlink_to(away.with_name("nowhere"))


def make_pipe(path: Path, away: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path, away: Path) -> None:
    path.mkdir()


def make_socket(path: Path, away: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)  # a bound one would allow 107 bytes of path


def make_empty(path: Path, away: Path) -> None:
    path.touch()


def make_huge(path: Path, away: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 41)


THINGS = (make_link, make_dangling_link, make_pipe, make_folder, make_socket, make_empty, make_huge)


def refused(folder: Path, make: Callable[[], None], **options: Any) -> str:
    """Save on two ranks, do something to the folder, load; return what both say. Their models stay as they are."""
    done = threading.Event()

    def body(mesh: Mapping[str, Comm]) -> str:
        net, optimizer = build(mesh, 2)
        shardwise.save_checkpoint(net, folder, tag="one")
        if next(iter(mesh.values())).rank == 0:
            make()
            done.set()
        assert done.wait(20)
        train(net, optimizer, mesh, range(1))
        before = state_of(net)
        with pytest.raises(CheckpointError) as caught:
            shardwise.load_checkpoint(net, folder, **options)
        assert_same(state_of(net), before)
        return str(caught.value)

    first, second = run_ranks(2, body, timeout=30)
    assert first == second
    return str(first)


@pytest.mark.parametrize("place", ["one/manifest.json", "one/rank-00001.safetensors", "latest", "one"])
@pytest.mark.parametrize("make", THINGS)
def test_what_is_no_file_of_this_folder_is_refused(
    make: Callable[[Path, Path], None], place: str, tmp_path: Path
) -> None:
    folder, away = tmp_path / "saved", tmp_path / "away"

    def replace() -> None:
        (folder / place).rename(away)
        make(folder / place, away)

    text = refused(folder, replace)
    assert place.split("/")[-1] in text


@pytest.mark.parametrize("background", [False, True])
def test_the_folder_that_a_user_names_may_be_a_link(background: bool, tmp_path: Path) -> None:
    net, _ = build({"data": LocalComm()}, 1)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    saved = shardwise.save_checkpoint(net, tmp_path / "link", tag="one", background=background, keep_last=1)
    (tmp_path / "link").unlink()  # it was followed already
    shardwise.wait_for_save(net)
    (tmp_path / "link").symlink_to("real")
    assert saved == tmp_path / "real" / "one"
    assert shardwise.load_checkpoint(net, tmp_path / "link").tag == "one"
    assert read_latest(tmp_path / "link") == "one"
    assert find_checkpoint(tmp_path / "link") == tmp_path / "link" / "one"
    (tmp_path / "real" / "two").symlink_to("one")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        shardwise.load_checkpoint(net, tmp_path / "link", tag="two")


@pytest.mark.needs_root
@pytest.mark.parametrize("place", ["manifest.json", "rank-00000.safetensors"])
def test_a_device_is_not_opened(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    real = os.open

    def watching(path: Any, *args: Any, **options: Any) -> int:
        opened.append(path)
        return real(path, *args, **options)

    def replace() -> None:
        (tmp_path / "one" / place).unlink()
        try:
            os.mknod(tmp_path / "one" / place, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: it never ends
        except PermissionError:
            make_pipe(tmp_path / "one" / place, tmp_path)
        monkeypatch.setattr(os, "open", watching)

    assert "is no regular file" in refused(tmp_path, replace)
    assert place not in opened


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", ".", "..", "../one", "/etc", "one/", "one/../one", "./one", "one\n\n", "one\r\n", " one", "one "),
        *(
            "one\0",
            "\0one",
            "latest",
            "-one",
            ".tmp-one",
            "x" * 129,
            "x" * 255,
            "a\\b",
            "\u00f6ne",
            "one\none",
            "$HOME",
        ),
    ],
)
def test_latest_names_a_tag_and_nothing_else(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(text.encode())
    with pytest.raises(CheckpointError, match="latest"):
        read_latest(tmp_path)


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"one" * 1000, b"\xed\xa0\x80"])
def test_latest_of_odd_bytes_is_refused_on_all_ranks(raw: bytes, tmp_path: Path) -> None:
    def write() -> None:
        (tmp_path / "latest").write_bytes(raw)

    assert "latest" in refused(tmp_path, write)


def test_files_of_another_save_are_refused(tmp_path: Path) -> None:
    def swap(name: str) -> Callable[[], None]:
        def act() -> None:
            shutil.copy(tmp_path / "other" / name, tmp_path / "one" / name)

        return act

    def body(mesh: Mapping[str, Comm]) -> None:
        net, _ = build(mesh, 2)
        shardwise.save_checkpoint(net, tmp_path, tag="other")

    run_ranks(2, body)
    assert "header is damaged" in refused(tmp_path, swap("rank-00001.safetensors"))
    shutil.rmtree(tmp_path / "one")
    assert "header is damaged" in refused(tmp_path, swap(MANIFEST))


def test_a_small_file_is_read_with_as_much_memory_as_it_has_bytes(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(5000))
    tracemalloc.start()
    try:
        read_small(tmp_path, "small", 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def saved_by(pid: int, start: str | None, host: str | None = None) -> str:
    return json.dumps({"host": host or socket.gethostname(), "pid": pid, "start": start})


@pytest.mark.parametrize(
    "owner",
    [
        *(saved_by(2**22 + 1, "1/x"), saved_by(2**22 + 1, None), saved_by(os.getpid(), "1/x"), saved_by(10**30, "x")),
        *("", "[" * 4000, "{}", "[]", "3", "null", "x" * 10_000, '{"host": 1, "pid": 1, "start": 1}'),
        *(saved_by(1, "x").replace(": 1,", f": {pid},") for pid in ("1e400", "-1", "[]", '"../self"', "0.5", "NaN")),
    ],
    ids=lambda owner: hashlib.sha256(owner.replace(str(os.getpid()), "own").encode()).hexdigest()[:8],
)
def test_a_leftover_of_nobody_is_cleared_whatever_it_says(owner: str, tmp_path: Path) -> None:
    leftover = tmp_path / ".tmp-one-x"
    leftover.mkdir()
    (leftover / ".owner").write_text(owner)
    (leftover / "rank-00000.safetensors").touch()
    clear_leftovers(tmp_path)
    assert not leftover.exists()


@pytest.mark.parametrize("make", [make_link, make_dangling_link, make_pipe, make_folder, make_socket, make_empty])
def test_odd_owners_of_checkpoints_do_not_keep_a_save_from_being_made(
    make: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    away, folder = tmp_path / "away", tmp_path / "saved"
    away.touch()
    net, _ = build({"data": LocalComm()}, 1)
    shardwise.save_checkpoint(net, folder, tag="one")
    make(folder / "one" / ".owner", away)
    shardwise.save_checkpoint(net, folder, tag="two")
    assert away.exists()
    assert {"one", "two", "latest"} == {path.name for path in folder.iterdir()}


def test_leftovers_that_may_be_in_use_stay(tmp_path: Path) -> None:
    make_temporary(tmp_path, "mine", SAVE_ID)
    far = make_temporary(tmp_path, "far", SAVE_ID)
    (far / ".owner").write_text(saved_by(1, "x", "elsewhere"))
    (tmp_path / ".tmp-young-x").mkdir()
    (tmp_path / ".tmp-old-x").mkdir()
    os.utime(tmp_path / ".tmp-old-x", (1, 1))
    clear_leftovers(tmp_path)
    assert tree(tmp_path) == {
        *(f".tmp-mine-{SAVE_ID}", f".tmp-mine-{SAVE_ID}/.owner", f".tmp-far-{SAVE_ID}", f".tmp-far-{SAVE_ID}/.owner"),
        ".tmp-young-x",
    }


def test_clearing_follows_no_link(tmp_path: Path) -> None:
    away, folder = tmp_path / "away", tmp_path / "saved"
    away.mkdir()
    (away / "precious").touch()
    (folder / ".gone-one-x").mkdir(parents=True)
    (folder / ".gone-one-x" / "link").symlink_to(away)
    (folder / ".tmp-two-x").symlink_to(away)
    clear_leftovers(folder)
    assert (away / "precious").exists()
    assert tree(folder) == {".tmp-two-x"}


def test_a_link_at_a_name_that_a_save_needs_is_refused(tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    (tmp_path / f".tmp-one-{SAVE_ID}").symlink_to(away)
    with pytest.raises(FileExistsError):
        make_temporary(tmp_path, "one", SAVE_ID)
    assert not any(away.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_other_run_clears_a_save_that_is_about_to_be_committed(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, _ = build({"data": LocalComm()}, 1)
    shardwise.save_checkpoint(net, tmp_path, tag="one")

    def sync(path: Path) -> None:
        clear_leftovers(tmp_path)

    monkeypatch.setattr(folder_module, "sync_folder", sync)
    shardwise.save_checkpoint(net, tmp_path, tag="one" if overwrite else "two", overwrite=overwrite)
    for name in {"one", "one" if overwrite else "two"}:
        verify_files(tmp_path / name)
        assert not (tmp_path / name / ".owner").exists()


class Dies(BaseException):
    """The process ends here."""


class NoSystem:
    """A C library without ``renameat2``."""


@pytest.mark.parametrize("dies_after", [1, 2, None])
def test_replacing_where_names_cannot_be_swapped(
    dies_after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: NoSystem())
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(name)
    temporary = make_temporary(tmp_path, "one", SAVE_ID)
    (tmp_path / "old").rename(tmp_path / "one")
    (tmp_path / "new" / MANIFEST).rename(temporary / MANIFEST)
    (tmp_path / "new").rmdir()
    renames, real = 0, os.rename

    def rename(source: Path, target: Path) -> None:
        nonlocal renames
        real(source, target)
        renames += 1
        if renames == dies_after:
            raise Dies

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        if dies_after is None:
            commit(temporary, tmp_path / "one", overwrite=True)
        else:
            with pytest.raises(Dies):
                commit(temporary, tmp_path / "one", overwrite=True)
    for owner in tmp_path.glob("*/.owner"):
        owner.write_text(saved_by(2**22 + 1, "1/x"))
    clear_leftovers(tmp_path)
    assert tree(tmp_path) == {"one", f"one/{MANIFEST}"}
    assert (tmp_path / "one" / MANIFEST).read_text() == ("old" if dies_after == 1 else "new")


def test_what_cannot_be_removed_does_not_undo_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = build({"data": LocalComm()}, 1)
    shardwise.save_checkpoint(net, tmp_path, tag="one")
    train(net, optimizer, {"data": LocalComm()}, range(1))

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        shardwise.save_checkpoint(net, tmp_path, tag="one", overwrite=True)
    assert shardwise.load_checkpoint(net, tmp_path, rng=False).step == 1


def test_a_process_that_dies_before_latest_is_replaced_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: Any) -> None:
        raise Dies

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        with pytest.raises(Dies):
            write_latest(tmp_path, "one", SAVE_ID)
    (owner,) = tmp_path.glob(".*/.owner")
    owner.write_text(saved_by(2**22 + 1, "1/x"))
    clear_leftovers(tmp_path)
    assert tree(tmp_path) == set()


def test_two_runs_that_save_under_the_same_names(tmp_path: Path) -> None:
    told: list[str] = []

    def save_often() -> None:
        net, _ = build({"data": LocalComm()}, 1)
        for step in range(60):
            try:
                shardwise.save_checkpoint(net, tmp_path, tag=f"t{step % 3}", step=step, overwrite=True, keep_last=2)
                told.append("")
            except BaseException as error:
                told.append(repr(error))

    runs = [threading.Thread(target=save_often) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert len(told) == 120
    # The other run may replace a checkpoint while this one reads its own back.
    assert not [text for text in told if text and "was saved, but older ones were not removed" not in text]
    assert told.count("") > 60
    for path in tmp_path.iterdir():
        assert not path.name.startswith(".")
        if path.name != "latest":
            verify_files(path)


def test_a_name_that_is_taken_or_let_go_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    real = os.path.lexists

    def look(path: Path) -> bool:
        found = real(path)
        if path == tmp_path / "one" and len(looked) < 2:
            looked.append(path)
            if found:
                shutil.rmtree(path)
            else:
                path.mkdir()
                (path / MANIFEST).touch()
        return found

    temporary = make_temporary(tmp_path, "one", SAVE_ID)
    (temporary / MANIFEST).write_text("new")
    monkeypatch.setattr(os.path, "lexists", look)
    commit(temporary, tmp_path / "one", overwrite=True)
    assert len(looked) == 2
    assert tree(tmp_path) == {"one", f"one/{MANIFEST}"}
    assert (tmp_path / "one" / MANIFEST).read_text() == "new"


def test_old_checkpoints_that_cannot_be_listed_are_told_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("shardwise.checkpoint.save.find_checkpoints", refuse)

    def body(mesh: Mapping[str, Comm]) -> str:
        net, _ = build(mesh, 2)
        with pytest.raises(CheckpointError) as caught:
            shardwise.save_checkpoint(net, tmp_path, tag="one", keep_last=1)
        return str(caught.value)

    first, second = run_ranks(2, body, timeout=20)
    assert first == second
    assert "was saved, but older ones were not removed. rank 0: " in first


def die_often(tmp_path: Path, kills: int) -> None:
    told = subprocess.run(
        [sys.executable, WORKER, tmp_path / "saved", str(kills)],
        check=False,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    answer = json.loads(told.stdout.splitlines()[-1])
    assert answer["kills"] == kills
    assert answer["in a save"] > 0


def test_a_process_killed_at_any_time_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    die_often(tmp_path, 12)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_process_killed_at_very_many_times_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    die_often(tmp_path, 300)


def chmod_folder(folder: Path) -> None:
    folder.chmod(0o777)


def chmod_file(folder: Path) -> None:
    (folder / "one" / "rank-00001.safetensors").chmod(0o666)


@pytest.mark.parametrize(("change", "place"), [(chmod_folder, "saved may"), (chmod_file, "rank-00001.safetensors may")])
def test_what_anyone_may_write_is_a_warning_or_an_error(
    change: Callable[[Path], None], place: str, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    assert f"{place} be written by anyone" in refused(folder, lambda: change(folder), strict_owner=True)
    net, _ = build({"data": LocalComm()}, 1)
    with pytest.warns(UserWarning, match="may be written by anyone"):
        shardwise.load_checkpoint(net, folder)


@pytest.mark.needs_root
def test_what_belongs_to_another_user_is_a_warning_or_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    net, _ = build({"data": LocalComm()}, 1)
    shardwise.save_checkpoint(net, folder, tag="one")
    os.chown(folder / "one" / "manifest.json", 12345, -1)
    with pytest.raises(CheckpointError, match=r"manifest.json belongs to user 12345"):
        shardwise.load_checkpoint(net, folder, strict_owner=True)
    with pytest.warns(UserWarning, match="belongs to user 12345"):
        shardwise.load_checkpoint(net, folder)


def test_a_sticky_folder_is_no_reason_to_warn(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    net, _ = build({"data": LocalComm()}, 1)
    shardwise.save_checkpoint(net, tmp_path, tag="one")
    shardwise.load_checkpoint(net, tmp_path, strict_owner=True)


def test_a_manifest_too_large_to_be_read_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = build({"data": LocalComm()}, 1)
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="bytes, more than the 1,000 it may"):
        shardwise.save_checkpoint(net, tmp_path, tag="one")
    assert not list(tmp_path.iterdir())


def test_a_save_is_private_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watching(temporary: Path, target: Path, *, overwrite: bool) -> None:
        seen.extend(stat.S_IMODE(path.stat().st_mode) for path in (temporary, *sorted(temporary.iterdir())))
        commit(temporary, target, overwrite=overwrite)

    monkeypatch.setattr(save_module, "commit", watching)
    net, _ = build({"data": LocalComm()}, 1)
    shardwise.save_checkpoint(net, tmp_path, tag="one")
    assert seen == [0o700, 0o600, 0o600, 0o600]  # the directory, its owner, the manifest, the tensors
