"""Checkpoints of DeepSpeed come in: real ones go on as DeepSpeed itself does; crafted ones run nothing.

DeepSpeed compiles a small extension the first time; TORCH_EXTENSIONS_DIR says where it is kept.
"""

import argparse
import copy
import functools
import io
import os
import pickle
import shutil
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.checkpoint.doors.compare import compare
from shardwise.checkpoint.doors.deepspeed import import_deepspeed
from shardwise.checkpoint.folder import read_manifest
from shardwise.checkpoint.verify import verify_files
from shardwise.comm.base import Comm
from shardwise.errors import CheckpointError
from shardwise.testing.ranks import run_ranks

from .deepspeed_save_worker import NUM_RANKS, NUM_STEPS, Net, configuration, optimizer_of, train_step
from .doors_case import Bomb

WORKER = Path(__file__).with_name("deepspeed_save_worker.py")
VARIANTS = (
    *("0-fp32", "1-fp32-universal", "2-fp32", "3-fp32-universal"),
    *("1-bf16", "2-bf16-universal", "3-bf16", "2-fp16", "3-fp16"),
)
CASES = [(variant.removesuffix("-universal"), variant, None) for variant in VARIANTS] + [
    (variant, variant, "global_step3_universal") for variant in VARIANTS if variant.endswith("universal")
]
SECONDS = 280.0
TAG = "global_step3"
MODEL, OPTIM = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every variant, made by two processes with real DeepSpeed."""
    folder = tmp_path_factory.mktemp("deepspeed")
    logs = [folder / f"log-{rank}" for rank in range(NUM_RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            command = [sys.executable, str(WORKER), str(rank), str(folder / "meet"), str(folder), *VARIANTS]
            processes.append(
                subprocess.Popen(command, stdout=stream, stderr=stream, env=os.environ | {"OMP_NUM_THREADS": "1"})
            )
    try:
        codes = [process.wait(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * NUM_RANKS, "\n".join(log.read_text()[-3000:] for log in logs)
    return folder


@pytest.mark.needs_peer("deepspeed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("variant", "tag"), [case[1:] for case in CASES], ids=[str(case[0]) for case in CASES])
def test_next_step_is_that_of_deepspeed(
    saved: Path, tmp_path: Path, variant: str, tag: str | None, num_ranks: int
) -> None:
    """Masters are the same to the bit; the next masters to 1e-6.

    On another number of ranks, 16-bit gradients are of other shares of the batch, and are rounded otherwise.
    """
    stage, dtype, *_ = variant.split("-")
    told = torch.load(saved / f"{variant}.pt", weights_only=True)
    path = import_deepspeed(saved / variant, tmp_path, tag)
    verify_files(path)
    other = Net(seed=7)

    def body(mesh: Mapping[str, Comm]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Any]:
        net = copy.deepcopy(other)
        engine, *_ = shardwise.initialize(
            model=net,
            optimizer=optimizer_of(net),
            config=configuration(int(stage), dtype, num_ranks),
            mesh=mesh,
        )
        assert engine.load_checkpoint(tmp_path) == (str(path), {"epoch": 4, "seen": (1, 2.5)})
        counters = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)
        assert counters == (NUM_STEPS, 12 * NUM_STEPS, 0, NUM_STEPS)
        weights = shardwise.full_state_dict(engine.module)
        before = shardwise.full_parameters(engine.module)
        train_step(engine, NUM_STEPS, mesh["data"].rank, num_ranks)
        return weights, before, shardwise.full_parameters(engine.module), engine.get_lr()

    weights, before, after, lr = run_ranks(num_ranks, body)[0]
    plain = Net()
    for name in ("frozen.weight", "frozen.bias", "table", "count"):
        torch.testing.assert_close(weights[name], plain.state_dict()[name].to(weights[name].dtype), rtol=0, atol=0)
    assert torch.equal(weights["head.weight"], weights["embed.weight"])
    largest = 0.0
    for name, expected in told["saved"].items():
        assert torch.equal(before[name], expected)
        assert not torch.equal(told["next"][name], expected)
        largest = max(largest, (after[name] - told["next"][name]).abs().max().item())
    print(f"{variant} at {num_ranks} ranks: {largest:.2e}")
    assert largest <= (1e-6 if dtype == "fp32" or num_ranks == NUM_RANKS else 1e-4)
    assert lr == pytest.approx(told["lr"], rel=1e-12)


@pytest.mark.needs_peer("deepspeed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.endswith("universal")])
def test_parts_are_joined_as_deepspeed_joins_them(saved: Path, tmp_path: Path, variant: str) -> None:
    """DeepSpeed's own conversion to its universal format is the oracle for masters and moments, to the bit."""
    ours = import_deepspeed(saved / variant, tmp_path, None)
    theirs = import_deepspeed(saved / variant, tmp_path, f"{TAG}_universal")
    found = compare(ours, theirs)
    assert found.identical, found
    assert sum(key.startswith("optim.") for key in read_manifest(ours).by_key) == 2 * 6


@pytest.mark.needs_peer("deepspeed")
@pytest.mark.timeout(600)
def test_the_loss_scale_goes_on(saved: Path, tmp_path: Path) -> None:
    """DeepSpeed lets the scale grow one step later than its window of 2 says, then every 2 steps: at steps 3, 5, ..."""
    path = import_deepspeed(saved / "2-fp16", tmp_path, None)
    assert read_manifest(path).values.loss_scale == {"scale": 512.0, "clean_steps": 0.0, "tolerance": 2.0}
    assert torch.load(saved / "2-fp16.pt", weights_only=True)["scale"] == 512.0


class FakeAddress:
    """Pickles under the name that DeepSpeed has for the place of a fragment."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


FakeAddress.__module__, FakeAddress.__qualname__ = "deepspeed.utils.tensor_fragment", "fragment_address"


def write_crafted(folder: Path, *, change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None) -> Path:
    """Write what DeepSpeed writes at stage 1 for one parameter of 5 elements on two ranks."""
    path = folder / TAG
    path.mkdir(parents=True)
    weight = torch.arange(5.0)
    model: dict[str, Any] = {
        "module": OrderedDict(weight=weight, count=torch.tensor(2)),
        "buffer_names": ["count"],
        "param_shapes": [OrderedDict(weight=torch.Size([5]))],
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 3,
        "global_samples": 6,
        "skipped_steps": 1,
        "ds_config": {"gradient_accumulation_steps": 2},
        "epoch": 1,
    }
    for rank, (first, last) in enumerate([(0, 3), (3, 5)]):
        states = {
            "step": torch.tensor(2.0),
            "exp_avg": torch.full((3,), float(rank)),
            "exp_avg_sq": torch.full((3,), 2.0),
        }
        group = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
        optim: dict[str, Any] = {
            "zero_stage": 1,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [weight[first:last].clone()],
            "base_optimizer_state": {"state": {0: states}, "param_groups": [group]},
            "param_slice_mappings": [OrderedDict(weight={"numel": last - first, "start": 0})],
        }
        if change is not None:
            change(model, optim)
        save_with_addresses({"optimizer_state_dict": optim}, path / OPTIM.format(rank))
    torch.save(model, path / MODEL)
    (folder / "latest").write_text(TAG)
    return folder


def save_with_addresses(states: dict[str, Any], file: Path) -> None:
    """Save with places of fragments as DeepSpeed's class, which is not there."""
    for table in states["optimizer_state_dict"]["param_slice_mappings"]:
        for name, place in table.items():
            table[name] = FakeAddress(**place)
    names = ("deepspeed", "deepspeed.utils", "deepspeed.utils.tensor_fragment")
    kept = {name: sys.modules.get(name) for name in names}
    made = {name: types.ModuleType(name) for name in names}
    made[names[-1]].fragment_address = FakeAddress  # type: ignore[attr-defined]
    sys.modules.update(made)
    try:
        torch.save(states, file)
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def rewritten(file: Path, raw: bytes) -> None:
    """Put another pickle into a file of torch.save."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(name, raw if name.endswith("/data.pkl") else content)


def refused(source: Path, folder: Path, match: str, tag: str | None = None) -> None:
    """Check that nothing comes of a source."""
    with pytest.raises(CheckpointError, match=match):
        import_deepspeed(source, folder / "new", tag)
    assert not (folder / "new").exists() or not list((folder / "new").glob("[!.]*"))


def test_crafted_files_come_in(tmp_path: Path) -> None:
    path = import_deepspeed(write_crafted(tmp_path / "old"), tmp_path / "new", None)
    manifest = verify_files(path)
    assert (path.name, manifest.step, manifest.values.user) == (TAG, 3, {"epoch": 1})
    assert manifest.values.objects["engine"] == {
        "global_steps": 3,
        "global_samples": 6,
        "skipped_steps": 1,
        "micro_steps": 6,
    }
    assert set(manifest.by_key) == {
        "param.weight",
        "buffer.count",
        "optim.0.exp_avg.weight",
        "optim.0.exp_avg_sq.weight",
    }
    assert [group.params for group in manifest.values.optimizers[0].groups] == [("weight",)]
    assert manifest.values.optimizers[0].class_name == "AdamW"


@pytest.mark.parametrize("file", [MODEL, OPTIM.format(1)])
def test_a_crafted_pickle_runs_nothing_and_is_named(tmp_path: Path, file: str) -> None:
    source = write_crafted(tmp_path / "old")
    mark = tmp_path / "mark"
    rewritten(source / TAG / file, pickle.dumps({"module": Bomb(mark)}, protocol=2))
    refused(source, tmp_path, rf"{file}: asks for \S*open")
    assert not mark.exists()


@pytest.mark.parametrize("text", ["..", "../old", "/etc", f"{TAG}/../{TAG}", "", "a\0b", ".", "nothing"])
def test_latest_leads_nowhere_else(tmp_path: Path, text: str) -> None:
    source = write_crafted(tmp_path / "old")
    (source / "latest").write_text(text)
    refused(source, tmp_path, "is no name of a checkpoint|is no directory of its own")


@pytest.mark.parametrize("what", [TAG, "latest", f"{TAG}/{MODEL}"])
def test_links_are_refused(tmp_path: Path, what: str) -> None:
    source = write_crafted(tmp_path / "old")
    (source / what).rename(tmp_path / "elsewhere")
    (source / what).symlink_to(tmp_path / "elsewhere")
    refused(source, tmp_path, "is no directory of its own|is no regular file|Too many levels")


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    for number, rank in enumerate((0, 1)):
        source = write_crafted(tmp_path / f"missing-{number}")
        (source / TAG / OPTIM.format(rank)).unlink()
        refused(source, tmp_path, "rank 0 are missing|partitions, there are files of 1 ranks")
    source = write_crafted(tmp_path / "cut")
    file = source / TAG / OPTIM.format(1)
    whole = file.read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        refused(source, tmp_path, f"{file.name}: is no file of torch.save")
    flipped = bytearray(whole)
    flipped[whole.index(torch.full((3,), 2.0).numpy().tobytes())] ^= 1
    file.write_bytes(bytes(flipped))
    refused(source, tmp_path, f"{file.name}: .* is damaged")
    shutil.rmtree(source / TAG)
    refused(source, tmp_path, "is no directory of its own")


def _short(model: dict[str, Any], optim: dict[str, Any]) -> None:
    optim["single_partition_of_fp32_groups"][0] = torch.zeros(1)


def _huge(model: dict[str, Any], optim: dict[str, Any]) -> None:
    model["param_shapes"] = [OrderedDict(weight=torch.Size([1 << 50]))]


def _negative(model: dict[str, Any], optim: dict[str, Any]) -> None:
    optim["param_slice_mappings"][0]["weight"]["start"] = -1


def _no_module(model: dict[str, Any], optim: dict[str, Any]) -> None:
    model["module"] = 3


def _alien_state(model: dict[str, Any], optim: dict[str, Any]) -> None:
    optim["base_optimizer_state"]["state"][0]["error"] = torch.zeros(2)


def _no_names(model: dict[str, Any], optim: dict[str, Any]) -> None:
    model["param_shapes"] = None


@pytest.mark.parametrize("change", [_short, _huge, _negative, _no_module, _alien_state, _no_names])
def test_contradictions_are_errors(tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    refused(write_crafted(tmp_path / "old", change=change), tmp_path, "global_step3")


@pytest.mark.parametrize("name", ["mp_rank_01_model_states.pt", "layer_00-model_states.pt", "layer_0_expert_0_x.pt"])
def test_other_kinds_of_parallelism_are_named(tmp_path: Path, name: str) -> None:
    source = write_crafted(tmp_path / "old")
    (source / TAG / name).touch()
    refused(source, tmp_path, "are not read")


def test_a_copy_that_is_not_the_rounded_master_comes_in(tmp_path: Path) -> None:
    """A master of 2.0001 is 2 in bf16; here the model computes with another value."""

    def change(model: dict[str, Any], optim: dict[str, Any]) -> None:
        model["module"]["weight"] = torch.tensor([0.0, 1.0, 2.0, 3.0, 5.0], dtype=torch.bfloat16)

    manifest = verify_files(import_deepspeed(write_crafted(tmp_path / "old", change=change), tmp_path / "new", None))
    assert manifest.params[0].dtype == manifest.by_key["compute.weight"].dtype == "BF16"
    assert manifest.by_key["param.weight"].dtype == "F32"


def test_what_has_no_place_here_is_told(tmp_path: Path) -> None:
    def change(model: dict[str, Any], optim: dict[str, Any]) -> None:
        model |= {"lr_scheduler": {"last_batch_iteration": 2}, "noise": torch.zeros(3), "names": {"a"}}
        model["ds_config"]["scheduler"] = {"type": "SomebodyElses"}
        optim["base_optimizer_state"]["param_groups"][0]["weight_decay"] = 0.1

    source = write_crafted(tmp_path / "old", change=change)
    with pytest.warns(UserWarning, match="left out|AdamW") as told:
        manifest = verify_files(import_deepspeed(source, tmp_path / "new", None))
    texts = " ".join(str(warning.message) for warning in told)
    for part in ("SomebodyElses", "noise, names", "Adam or AdamW"):
        assert part in texts
    assert set(manifest.values.objects) == {"engine"}
    assert manifest.values.user == {"epoch": 1}


def test_an_optimizer_without_names_is_taken_only_if_there_is_no_doubt(tmp_path: Path) -> None:
    """Without ZeRO, parameters are told by shape; two of one shape in two groups are not."""
    path = tmp_path / "old" / TAG
    path.mkdir(parents=True)
    states = {n: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)} for n in range(2)}
    groups = [{"lr": 1.0, "weight_decay": 0.0, "params": [n]} for n in range(2)]
    model = {
        "module": {"a": torch.zeros(2), "b": torch.ones(2)},
        "buffer_names": [],
        "optimizer": {"state": states, "param_groups": groups},
        "param_shapes": None,
        "global_steps": 1,
    }
    torch.save(model, path / MODEL)
    with pytest.warns(UserWarning, match="the state of the optimizer is left out: it names nothing"):
        manifest = verify_files(import_deepspeed(path, tmp_path / "new", None))
    assert set(manifest.by_key) == {"param.a", "param.b"}
    assert manifest.values.optimizers == ()


class Odd:
    """Pickles as a call of something, with a state."""

    def __init__(self, call: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.reduced = (call, arguments) if state is None else (call, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


class Pickler(pickle.Pickler):
    """Writes storages as torch does: as names of entries of the file."""

    def persistent_id(self, item: Any) -> Any:
        return item.told if isinstance(item, Storage) else None


class Storage:
    """A storage that a file claims to have."""

    def __init__(self, *told: Any) -> None:
        self.told = told


def storage(numel: int, key: str = "0") -> Storage:
    return Storage("storage", torch.FloatStorage, key, "cpu", numel)


def made(storage: Any, offset: Any, size: Any, stride: Any, state: Any = None) -> Odd:
    return Odd(torch._utils._rebuild_tensor_v2, (storage, offset, size, stride, False, OrderedDict()), state)


@pytest.mark.parametrize(
    ("crafted", "message"),
    [
        (argparse.Namespace(a=1), "argparse.Namespace"),
        (functools.partial(print), "functools.partial"),
        (made(storage(5), 0, (5, 1000), (0, 0)), "larger than its storage"),
        (made(storage(5), 3, (3,), (1,)), "larger than its storage"),
        (made(storage(5), -1, (3,), (1,)), "has the shape"),
        (made(storage(1 << 40), 0, (3,), (1,)), "claims 1099511627776 elements"),
        (made(storage(1, "../../x"), 0, (1,), (1,)), "claims 1 elements"),
        (made([1.0], 0, (1,), (1,)), "no storage"),
        (made(storage(5), 0, (5,), (1,), (torch.float32, 0, (1 << 40,), (1,))), "sets attributes of a Tensor"),
        (Odd(torch._tensor._rebuild_from_type_v2, (set, torch.Tensor, ([],), {})), "something else"),
        (Storage("module", "x"), "no storage of a tensor"),
        (Odd(torch._utils._rebuild_tensor_v2, ()), "is malformed"),
    ],
)
def test_a_file_gives_no_more_than_it_has(tmp_path: Path, crafted: Any, message: str) -> None:
    source = write_crafted(tmp_path / "old")
    raw = io.BytesIO()
    Pickler(raw, protocol=2).dump({"module": crafted})
    rewritten(source / TAG / MODEL, raw.getvalue())
    refused(source, tmp_path, f"{MODEL}: .*{message}")


@pytest.mark.parametrize("name", ["..", "../old", "a/b", "/etc", "", "linked"])
def test_names_of_the_universal_format_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "old" / TAG
    (path / "zero").mkdir(parents=True)
    (path / "zero" / "linked").symlink_to(tmp_path)
    model = {"module": {}, "buffer_names": [], "param_shapes": [{name: (1,)}], "global_steps": 1}
    torch.save(model, path / MODEL)
    torch.save({"param_groups": []}, path / "zero" / "optimizer_state.pt")
    torch.save(torch.zeros(1), tmp_path / "fp32.pt")
    refused(path, tmp_path, "is no name of a directory|is a link")
