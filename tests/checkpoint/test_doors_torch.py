"""A plain state dict of torch, out and in."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint.doors import scratch
from shardwise.checkpoint.doors.torchfile import export_torch, import_torch
from shardwise.checkpoint.folder import read_manifest
from shardwise.errors import CheckpointError

from .case import assert_same, same_bits, tree
from .doors_case import Bomb, load_odd, plain_odd, save_odd


@pytest.mark.parametrize("in_memory_bytes", [1 << 20, 1])
def test_export_is_the_state_dict_with_all_names(
    tmp_path: Path, in_memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_IN_MEMORY_BYTES", in_memory_bytes)
    _, expected = save_odd(tmp_path / "run")
    export_torch(tmp_path / "run" / "a", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same(found, expected)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())
    net = plain_odd()
    net.load_state_dict(found)
    assert {path for path in tree(tmp_path) if not path.startswith("run")} == {"model.pt"}


def test_export_rounds_parameters_only(tmp_path: Path) -> None:
    state, expected = save_odd(tmp_path / "run", num_ranks=1)
    export_torch(tmp_path / "run" / "a", tmp_path / "model.pt", dtype=torch.bfloat16)
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert same_bits(found["cube"], state["master cube"].bfloat16())
    assert same_bits(found["table"], expected["table"])


def test_export_leaves_nothing_behind_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_odd(tmp_path / "run", num_ranks=1)
    before = tree(tmp_path)

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="was not written: unexpected pos"):
        export_torch(tmp_path / "run" / "a", tmp_path / "model.pt")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("key", [None, "state_dict", "model", "module"])
def test_import_takes_a_state_dict_alone_or_wrapped(tmp_path: Path, key: str | None) -> None:
    net = plain_odd()
    state = net.state_dict()
    torch.save(state if key is None else {key: state, "epoch": 3}, tmp_path / "model.pt")
    import_torch(tmp_path / "model.pt", tmp_path / "in", "x", buffers=["table"])
    params = {param.name: param for param in read_manifest(tmp_path / "in" / "x").params}
    assert params["embed.weight"].aliases == ("head.weight",)
    found, kept = load_odd(tmp_path / "in", "x", weights_only=True)
    for name, param in net.named_parameters():
        assert same_bits(found[f"master {name}"], param.detach())
    assert_same(kept, state)


def test_import_takes_views_and_extra_state(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    torch.save({"t": whole.t(), "part": whole[1:3], "m._extra_state": {"scale": 0.5}}, tmp_path / "model.pt")
    import_torch(tmp_path / "model.pt", tmp_path / "in", "x")
    export_torch(tmp_path / "in" / "x", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.pop("m._extra_state") == {"scale": 0.5}
    assert_same(back, {"t": whole.t().contiguous(), "part": whole[1:3]})
    assert read_manifest(tmp_path / "in" / "x").values.extra_state == {"m": {"scale": 0.5}}


def test_crafted_pickle_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({"w": torch.zeros(2), "x": Bomb(mark)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values"):
        import_torch(tmp_path / "model.pt", tmp_path / "in")
    assert not mark.exists()
    assert tree(tmp_path) == {"model.pt"}
    torch.load(tmp_path / "model.pt", weights_only=False)["x"].close()
    assert mark.exists()  # so it would have


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(1).expand(1 << 40), "repeats its elements"),
        (torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True), "no dense tensor"),
        (torch.empty(2, device="meta"), "no dense tensor"),
        (torch.zeros(2, dtype=torch.complex128), None),
        ("text", "is no state dict of tensors: v"),
        ({"a": 1}, "is no state dict of tensors: v"),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_refused_by_name(tmp_path: Path, value: Any, words: str | None) -> None:
    torch.save({"w": nn.Parameter(torch.zeros(2)), "v": value}, tmp_path / "model.pt")
    if words is None:
        import_torch(tmp_path / "model.pt", tmp_path / "in", "x")
        return
    with pytest.raises(CheckpointError, match=words):
        import_torch(tmp_path / "model.pt", tmp_path / "in")
    assert tree(tmp_path) == {"model.pt"}


@pytest.mark.parametrize(
    "state",
    [
        {"y\x1b[2J": torch.zeros(2)},
        {"y\x1b[2J": None},
        {"y\x1b[2J": 3},
        {"y\x1b[2J": torch.zeros(1).expand(9)},
        {"z\x1b[31m._extra_state": 3},
        {"z._extra_state": {"\x1b": {1, 2}}},
        {"x" * 5000: None},
    ],
)
def test_names_that_no_manifest_holds_are_refused_and_drive_no_terminal(tmp_path: Path, state: dict[str, Any]) -> None:
    weight = torch.zeros(2)
    torch.save(
        {"w": weight} | {name: weight if value is None else value for name, value in state.items()}, tmp_path / "a.pt"
    )
    with pytest.raises(CheckpointError) as caught:
        import_torch(tmp_path / "a.pt", tmp_path / "in")
    assert str(caught.value).isprintable()
    assert "pydantic" not in str(caught.value)


def test_values_with_their_sign_kept_aside_come_in(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "neg": torch._neg_view(torch.ones(3))}, tmp_path / "a.pt")
    path = import_torch(tmp_path / "a.pt", tmp_path / "in")
    export_torch(path, tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["neg"], -torch.ones(3))


def test_compressed_and_cut_files_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1 << 16)}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in entries.items():
            archive.writestr(name, raw)
    raw = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(raw[: len(raw) // 2])
    (tmp_path / "text.pt").write_text("nothing")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({1: torch.zeros(2)}, tmp_path / "number.pt")
    for name, words in (
        ("packed.pt", "holds more than its"),
        ("cut.pt", "is no file of torch.save"),
        ("text.pt", "is no file of torch.save"),
        ("absent.pt", "is no file of torch.save"),
        ("list.pt", "expected a state dict"),
        ("number.pt", "expected a state dict"),
    ):
        with pytest.raises(CheckpointError, match=words):
            import_torch(tmp_path / name, tmp_path / "in")


def test_flipped_bit_is_found_although_torch_does_not_look(tmp_path: Path) -> None:
    torch.save({"w": torch.full((1000,), 3.0)}, tmp_path / "model.pt")
    raw = bytearray((tmp_path / "model.pt").read_bytes())
    raw[raw.index(torch.full((9,), 3.0).numpy().tobytes()) + 4000 - 8] ^= 1
    (tmp_path / "model.pt").write_bytes(raw)
    assert (torch.load(tmp_path / "model.pt", weights_only=True)["w"] != 3.0).sum() == 1
    with pytest.raises(CheckpointError, match="is damaged: its checksum does not fit"):
        import_torch(tmp_path / "model.pt", tmp_path / "in")
    import_torch(tmp_path / "model.pt", tmp_path / "in", verify=False)
