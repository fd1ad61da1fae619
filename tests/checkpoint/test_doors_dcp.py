"""The format of torch.distributed.checkpoint, out and in; our format under plain ``dcp.load`` and ``dcp.save``."""

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import shardwise
from shardwise.checkpoint.doors.compare import compare
from shardwise.checkpoint.doors.dcp import (
    ShardwiseStorageReader,
    ShardwiseStorageWriter,
    export_dcp,
    import_dcp,
)
from shardwise.checkpoint.folder import read_manifest
from shardwise.comm.base import Comm
from shardwise.errors import CheckpointError
from shardwise.testing.ranks import run_ranks

from . import fsdp2_worker
from .case import assert_same, build, same_bits, state_of, tree
from .doors_case import Bomb, leaves_mark, load_odd, plain_odd, save_odd

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Body = Callable[[Mapping[str, Comm]], dict[str, Tensor]]


def masters_and_moments(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith("copy ")}


def run_net(folder: Path | None, tag: str | None, steps: list[int], save: Path | None) -> list[dict[str, Tensor]]:
    """Load or begin a model on 3 ranks, train, save; return the whole state."""

    def body(mesh: Mapping[str, Comm]) -> dict[str, Tensor]:
        net, optimizer = build(
            mesh, 3, model=lambda: fsdp2_worker.Net(seed=1), make=lambda net: fsdp2_worker.optimizer_of(net)
        )
        if folder is not None:
            shardwise.load_checkpoint(net, folder, tag=tag)
        for step in steps:
            fsdp2_worker.loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if save is not None:
            shardwise.save_checkpoint(net, save, tag="a")
        return masters_and_moments(state_of(net, buffers=False))

    return run_ranks(3, body)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_fsdp2_without_this_library_goes_on_and_comes_back(tmp_path: Path) -> None:
    saved = run_net(None, None, [0, 1, 2], tmp_path / "run")[0]
    export_dcp(tmp_path / "run" / "a", tmp_path / "converted")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, fsdp2_worker.__file__, str(tmp_path), str(rank)], env=environment)
        for rank in range(fsdp2_worker.NUM_RANKS)
    ]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    told = torch.load(tmp_path / "told.pt", weights_only=True)
    assert_same(told["loaded"], saved)
    assert_same(told["read"], saved)
    assert_same(told["again"], saved)
    assert told["lr"] == [0.02, 0.02]
    assert told["epoch"] == 3
    assert same_bits(told["columns"], saved["master embed.weight"])
    assert "the part (11, 3) at (0, 0) of (11, 6) is not consecutive" in told["refused"]
    assert_near(told["stepped"], run_net(tmp_path / "run", "a", [100], None)[0])

    import_dcp(tmp_path / "theirs", tmp_path / "in", tied={"head.weight": "embed.weight"}, buffers=["table"])
    manifest = read_manifest(tmp_path / "in" / "step-4")
    assert manifest.values.optimizers[0].class_name == "AdamW"
    assert manifest.values.user == {"epoch": 3}
    assert_same(run_net(tmp_path / "in", None, [], None)[0], told["stepped"])
    written = read_manifest(tmp_path / "written")
    assert (written.num_ranks, written.step) == (2, 4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_there_and_back_is_the_same(tmp_path: Path, dtype: torch.dtype | None) -> None:
    state, kept = save_odd(tmp_path / "run", dtype=dtype)
    export_dcp(tmp_path / "run" / "a", tmp_path / "dcp")
    path = import_dcp(tmp_path / "dcp", tmp_path / "in")
    assert path.name == f"step-{read_manifest(tmp_path / 'run' / 'a').step}"
    found = compare(tmp_path / "run" / "a", path)
    assert not found.unlike
    assert not found.changed
    assert set(found.only_first) <= {"rng.torch", "rng.python", "rng.numpy"}
    assert set(found.only_second) <= {"optim.0.exp_avg.empty", "optim.0.exp_avg_sq.empty"}
    if dtype is None:
        found_state, found_kept = load_odd(tmp_path / "in", path.name)
        assert_same(found_state, state)
        assert_same(found_kept, kept)


def test_plain_load_gives_a_plain_model_its_weights(tmp_path: Path) -> None:
    _, expected = save_odd(tmp_path / "run")
    export_dcp(tmp_path / "run" / "a", tmp_path / "dcp")
    net = plain_odd()
    nested = {"model": net.state_dict()}
    dcp.load(nested, checkpoint_id=tmp_path / "dcp")
    assert_same(nested["model"], expected)
    flat = plain_odd().state_dict()
    dcp.load(flat, storage_reader=ShardwiseStorageReader(tmp_path / "run", flat=True))
    assert_same(flat, expected)


def test_reader_refuses_what_is_damaged(tmp_path: Path) -> None:
    save_odd(tmp_path / "run", num_ranks=1)
    file = tmp_path / "run" / "a" / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    at = raw.index(read_manifest(tmp_path / "run" / "a").save_id.encode())
    assert at > 0
    for position in range(4096, len(raw)):
        raw[position] ^= 1
    file.write_bytes(raw)
    with pytest.raises(dcp.CheckpointException, match="is damaged: its hash is not the manifest's"):
        dcp.load(plain_odd().state_dict(), storage_reader=ShardwiseStorageReader(tmp_path / "run" / "a", flat=True))


def test_writer_keeps_tensors_and_plain_values_and_nothing_else(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "w": torch.randn(3, 4),
        "empty": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
        "nested": {"list": [torch.arange(3), {"x": (1, None, float("inf"))}]},
    }
    dcp.save(state, storage_writer=ShardwiseStorageWriter(tmp_path / "a"))
    back: dict[str, Any] = {
        "w": torch.zeros(3, 4),
        "empty": torch.zeros(0, 3),
        "one": torch.tensor(0.0),
        "nested": {"list": [torch.zeros(3, dtype=torch.int64), {"x": ()}]},
    }
    dcp.load(back, storage_reader=ShardwiseStorageReader(tmp_path / "a"))
    assert same_bits(back["w"], state["w"])
    assert same_bits(back["one"], state["one"])
    assert torch.equal(back["nested"]["list"][0], torch.arange(3))
    assert back["nested"]["list"][1] == {"x": (1, None, float("inf"))}
    export_dcp(tmp_path / "a", tmp_path / "dcp")
    back["w"] = torch.zeros(3, 4)
    dcp.load(back, checkpoint_id=tmp_path / "dcp")
    assert same_bits(back["w"], state["w"])
    before = tree(tmp_path)
    for refused, words in (
        ({"w": torch.zeros(2), "p": tmp_path}, "cannot be read as tensors and plain values"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, "which a checkpoint does not hold"),
        ({"x": 1}, "no tensors"),
    ):
        with pytest.raises(dcp.CheckpointException, match=words):
            dcp.save(refused, storage_writer=(writer := ShardwiseStorageWriter(tmp_path / "b")))
        writer.reset()
        assert tree(tmp_path) == before
    with pytest.raises(dcp.CheckpointException, match="exists already"):
        dcp.save(state, storage_writer=ShardwiseStorageWriter(tmp_path / "a"))


def test_flat_optimizers_and_values_of_others_are_understood(tmp_path: Path) -> None:
    one, two = torch.randn(2, 3), torch.randn(3)
    state = {
        "l.w": one,
        "l.b": two,
        "optimizer": {
            "state.l.w.exp_avg": one + 1,
            "state.l.w.exp_avg_sq": one + 2,
            "state.l.w.step": torch.tensor(6.0),
            "param_groups.l.w.lr": 0.1,
            "param_groups.l.w.betas": (0.9, 0.99),
            "param_groups.l.b.lr": 0.2,
            "param_groups.l.b.betas": (0.9, 0.99),
        },
        "train_state": {"tokens": 12, "rng": torch.zeros(4)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(CheckpointError, match="nothing tells the class"):
        import_dcp(tmp_path / "theirs", tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"train_state\.rng: neither model nor optimizer"):
        import_dcp(tmp_path / "theirs", tmp_path / "in", optimizer="AdamW")
    path = import_dcp(tmp_path / "theirs", tmp_path / "in", optimizer="AdamW", drop_unknown=True)
    manifest = read_manifest(path)
    (facts,) = manifest.values.optimizers
    assert path.name == "step-6"
    assert [param.name for param in manifest.params] == ["l.w", "l.b"]
    assert [(group.params, group.options["lr"]) for group in facts.groups] == [(("l.w",), 0.1), (("l.b",), 0.2)]
    assert manifest.values.user == {"train_state.tokens": 12}
    assert set(tree(tmp_path / "in")) == {
        "latest",
        path.name,
        f"{path.name}/manifest.json",
        f"{path.name}/rank-00000.safetensors",
    }


def test_names_that_are_not_tied_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(2), "b": torch.ones(2)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(CheckpointError, match="b and a are not tied"):
        import_dcp(tmp_path / "theirs", tmp_path / "in", tied={"b": "a"})


def make_theirs(folder: Path) -> Path:
    dcp.save(
        {"model": {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(2)}, "epoch": 1},
        checkpoint_id=folder,
        no_dist=True,
    )
    return folder


def change(folder: Path, how: Callable[[Any], None]) -> None:
    """Change the metadata of a checkpoint of torch."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def info_of(metadata: Any, key: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_crafted_metadata_does_not_run(tmp_path: Path, protocol: int) -> None:
    folder, mark = make_theirs(tmp_path / "theirs"), tmp_path / "mark"
    raw = pickle.dumps(Bomb(mark), protocol=protocol)
    assert leaves_mark(raw, mark)
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"asks for .*open, which no metadata needs; nothing was run"):
        import_dcp(folder, tmp_path / "in")
    change_raw = pickle.dumps({"planner_data": Bomb(mark)}, protocol=protocol)
    (folder / ".metadata").write_bytes(change_raw)
    with pytest.raises(CheckpointError, match="nothing was run"):
        import_dcp(folder, tmp_path / "in")
    assert not mark.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vchunks\nI1\nstb.",  # sets an attribute of a class
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__.__globals__\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        b"ctorch\nload\n.",
        b"ctorch\n_utils\n.",
        b"\x80\x04r\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"Pid\n.",
        b"",
        b".",
        b"N.",
    ],
)
def test_strange_metadata_is_refused_and_changes_nothing(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        import_dcp(tmp_path, tmp_path / "in")
    assert not hasattr(dcp.Metadata, "chunks")


@pytest.mark.parametrize("key", ["model.w", "epoch"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_crafted_items_do_not_run(tmp_path: Path, key: str, wrapped: bool) -> None:
    folder, mark = make_theirs(tmp_path / "theirs"), tmp_path / "mark"
    bomb: Any = {"x": Bomb(mark)} if wrapped else Bomb(mark)
    torch.save(bomb, folder / "bomb")

    def how(metadata: Any) -> None:
        info = info_of(metadata, key)
        info.relative_path, info.offset, info.length = "bomb", 0, (folder / "bomb").stat().st_size

    change(folder, how)
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values"):
        import_dcp(folder, tmp_path / "in")
    assert not mark.exists()
    assert not (tmp_path / "in" / "step-0").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/../../secret", "..", ".", "", "a\0b", "link", "sub"])
def test_paths_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    folder = make_theirs(tmp_path / "theirs")
    (folder / "__0_0.distcp").rename(tmp_path / "secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "sub").mkdir()

    def how(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    change(folder, how)
    with pytest.raises(CheckpointError, match=r"is no name of a file|Too many levels|is no regular file|symbolic"):
        import_dcp(folder, tmp_path / "in")


def bigger(metadata: Any) -> None:
    item = metadata.state_dict_metadata["model.w"]
    item.size = item.chunks[0].sizes = torch.Size([1 << 40, 4])


def outside(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].chunks[0].offsets = torch.Size([1, 0])


def twice(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["model.w"].chunks
    chunks.append(chunks[0])


def none(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].chunks.clear()


def other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].properties.dtype = torch.int32


def no_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].properties.dtype = "float32"


def no_place(metadata: Any) -> None:
    for index in [index for index in metadata.storage_data if index.fqn == "model.w"]:
        del metadata.storage_data[index]


def far(metadata: Any) -> None:
    info_of(metadata, "model.w").offset = 1 << 50


def negative(metadata: Any) -> None:
    info_of(metadata, "model.w").offset = -4


def swapped(metadata: Any) -> None:
    one, two = info_of(metadata, "model.w"), info_of(metadata, "model.b")
    one.offset, one.length = two.offset, two.length


def transformed(metadata: Any) -> None:
    info_of(metadata, "model.w").transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    "how", [bigger, outside, twice, none, other_dtype, no_dtype, no_place, far, negative, swapped, transformed]
)
def test_contradictions_are_refused_by_name(tmp_path: Path, how: Callable[[Any], None]) -> None:
    folder = make_theirs(tmp_path / "theirs")
    change(folder, how)
    with pytest.raises(CheckpointError, match=r"model\.w|__0_0\.distcp"):
        import_dcp(folder, tmp_path / "in")
    assert not (tmp_path / "in" / "step-0").exists()


def test_random_damage_gives_a_named_error_or_a_checkpoint(tmp_path: Path) -> None:
    folder = make_theirs(tmp_path / "theirs")
    generator = random.Random(4)
    originals = {name: (folder / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    refused = 0
    for number in range(300):
        name = generator.choice([".metadata", ".metadata", "__0_0.distcp"])
        raw = bytearray(originals[name])
        for _ in range(generator.randint(1, 3)):
            raw[generator.randrange(len(raw))] = generator.randrange(256)
        (folder / name).write_bytes(raw[: generator.randint(1, len(raw))] if number % 10 == 0 else raw)
        try:
            import_dcp(folder, tmp_path / "in", f"x{number}")
        except CheckpointError:
            refused += 1
        (folder / name).write_bytes(originals[name])
    assert 100 < refused < 300
    assert tree(tmp_path / "theirs") == {".metadata", "__0_0.distcp"}
