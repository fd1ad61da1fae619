"""What is done to checkpoints in ``test_damage.py``, and a rank that tries to load them; also a program of its own.

As a program it loads damaged checkpoints under a limit of memory and tells what files and code were touched.
"""

import copy
import json
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from torch import nn

import shardwise
from shardwise.checkpoint.contents import all_buckets, links_of
from shardwise.checkpoint.names import MANIFEST, rank_file
from shardwise.comm.base import Comm
from shardwise.comm.fake import LocalComm
from shardwise.errors import CheckpointError
from shardwise.managed import Managed

from .case import Odd, build, train

Files = dict[str, bytes]
Tree = Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**60, 2**62, 2**64, 10**300, 0.5, -0.0, 1e308, float("nan")),
    *("", "x", "../x", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, "F32", "I64", "U8", "F64", "BOOL", "F8_E5M2"),
    *(
        "param",
        "optim",
        "rng",
        "buffer",
        "compute",
        "torch",
        "python",
        "numpy",
        "step",
        "exp_avg",
        "scale",
        "embed.weight",
    ),
    *([], [0], [[]], [0] * 1000, [2**60] * 32, [2**61] * 40, ["a"], {}, {"a": 1}, {"step": "text"}),
    *({"$tuple": 5}, {"$tuple": []}, {"$float": "1"}, {"$float": "nan"}, {"$pairs": 3}, {"$pairs": [[[1], 2]]}),
    *({"$pairs": [[1, 2]]}, {"$scalar": 1}, {"$scalar": ["float32", "x"]}, {"$scalar": ["quint8", 1]}),
    *({"$scalar": ["complex64", 1]}, {"$scalar": ["load", 1]}, {"$scalar": ["int8", 1e300]}, {"$scalar": ["bits8", 1]}),
    *({"$dict": 3}, {"$dict": {"$tuple": 1}}, {"$scalar": ["bool", True]}, {"$scalar": ["int64", 10**30]}),
)


class Rich(Odd):
    """Adds a complex and an empty buffer, and a module state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.seen: Any = {"a": (1, 2.5)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = {"a": state["a"]}


class Rank:
    """One rank with a model that trains, a scheduler, and a digest of all that a load may change.

    Args:
        mesh: of this rank.
        own_generators: whether this rank is alone with the generators of its process.
    """

    def __init__(self, mesh: Mapping[str, Comm], stage: int = 2, *, own_generators: bool = True) -> None:
        self.mesh = mesh
        self.net, self.optimizer = build(mesh, stage, dtype=torch.float16, model=Rich)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self._own_generators = own_generators
        self._num_attempts = 100
        train(self.net, self.optimizer, mesh, range(2))

    def save(self, folder: Path, tag: str, **options: Any) -> None:
        user = {"pair": (1, [2.5, None]), 3: float("inf")}
        shardwise.save_checkpoint(
            self.net, folder, tag=tag, objects={"scheduler": self.scheduler}, user_state=user, **options
        )

    def step(self, number: int) -> None:
        train(self.net, self.optimizer, self.mesh, range(number, number + 1))
        self.scheduler.step()

    def attempt(self, folder: Path, tag: str | None = None, *, moves: bool = True, **options: Any) -> str:
        """Load; return the refusal, else nothing. After a refusal everything must be as it was.

        An update comes first (``moves``): what holds the checkpoint's own values would not show that some were written.
        """
        if moves:
            self.step(self._num_attempts)
            self._num_attempts += 1
        before = self.digest()
        said = ""
        try:
            shardwise.load_checkpoint(self.net, folder, tag=tag, objects={"scheduler": self.scheduler}, **options)
        except CheckpointError as error:
            said = str(error)
        assert not said or self.digest() == before, f"changed by a refused load: {said}"
        return said

    def digest(self) -> str:
        """Hash parameters, optimizer, buffers, generators, scheduler, scale, module state, bit by bit."""
        managed = Managed.of(self.net)
        seen = xxhash.xxh3_128()
        scaler = managed.runtime.scaler
        for bucket in all_buckets(managed):
            bucket.params.settle()
            _add(seen, [bucket.params.master, bucket.params.owned()])
        for link in links_of(managed):
            for fragments in link.fragments():
                _add(seen, [link.optimizer.state.get(param) for param in fragments.params.values()])
            _add(seen, [{k: v for k, v in group.items() if k != "params"} for group in link.optimizer.param_groups])
        _add(seen, dict(self.net.named_buffers()))
        _add(seen, [vars(self.scheduler), self.net.seen, managed.runtime.num_steps, scaler and scaler.state()])
        if self._own_generators:
            _add(seen, [torch.get_rng_state(), random.getstate(), numpy.random.get_state()])
        return seen.hexdigest()


def _add(seen: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().contiguous().reshape(-1)
        seen.update(f"{value.dtype}{tuple(value.shape)}".encode())
        seen.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(value, numpy.ndarray):
        seen.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            seen.update(ascii(key).encode())
            _add(seen, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(seen, item)
    elif not isinstance(value, nn.Module | torch.optim.Optimizer) and not callable(value):
        seen.update(ascii(value).encode())


def read_files(folder: Path) -> Files:
    """Return every file of a checkpoint."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_files(folder: Path, files: Files) -> None:
    """Make a checkpoint of just these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def unseal(raw: bytes) -> Tree:
    """Return what a manifest says."""
    return json.loads(raw)["manifest"]


def seal(fields: Tree) -> bytes:
    """Return a manifest with a right hash over anything; bytes and texts stay what they are."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return f'{{"hash":"{xxhash.xxh3_128_hexdigest(body)}","manifest":\n'.encode() + body + b"\n}\n"


def header_of(raw: bytes) -> tuple[Tree, bytes]:
    """Return the header of a tensor file and its data."""
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(files: Files, index: int, header: Tree | bytes) -> Files:
    """Give a file another header, and the manifest what fits it: length and hash are right."""
    name = rank_file(index)
    _, data = header_of(files[name])
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<Q", len(text)) + text
    fields = unseal(files[MANIFEST])
    fields["files"][index] = {"bytes": len(head) + len(data), "header": xxhash.xxh3_128_hexdigest(head)}
    return {**files, name: head + data, MANIFEST: seal(fields)}


def with_data(files: Files, kind: str, name: str, change: Callable[[bytearray], None]) -> Files:
    """Change the bytes of each copy of a tensor, and the manifest's hash with it."""
    files, fields = dict(files), unseal(files[MANIFEST])
    for item in fields["stored"]:
        if (item["kind"], item["name"]) == (kind, name):
            for piece in item["pieces"]:
                path = rank_file(piece["file"])
                header, data = header_of(files[path])
                begin, end = header[f"{kind}.{name}"]["data_offsets"]
                own = bytearray(data[begin:end])
                change(own)
                base = len(files[path]) - len(data)
                files[path] = files[path][: base + begin] + bytes(own) + files[path][base + end :]
                piece["hash"] = xxhash.xxh3_128_hexdigest(bytes(own))
    return {**files, MANIFEST: seal(fields)}


def flip(rng: random.Random, files: Files, other: Files) -> Files:
    """Flip some bits of one file, cut it, put bytes in, take it away, or take the other save's."""
    name = rng.choice(sorted(files))
    raw = bytearray(files[name])
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            raw[_position(rng, raw)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del raw[_position(rng, raw) :]
    elif kind == 2:
        at = _position(rng, raw)
        raw[at:at] = rng.randbytes(rng.choice((1, 2, 8, 4096)))
    elif kind == 3:
        at = _position(rng, raw)
        del raw[at : at + rng.choice((1, 8, 64))]
    elif kind == 4 and rng.random() < 0.2:
        return {key: value for key, value in files.items() if key != name}
    elif kind == 4:
        at = _position(rng, raw)
        raw[at : at + 16] = bytes(rng.choice((0, 255)) for _ in raw[at : at + 16])
    else:
        return {**files, name: rng.choice(list(other.values()))}
    return {**files, name: bytes(raw)}


def _position(rng: random.Random, raw: bytearray) -> int:
    return rng.randrange(rng.choice((16, 4096, len(raw)))) % len(raw)


def edit(rng: random.Random, files: Files, other: Files) -> Files:
    """Change the tree of the manifest or of a header in some places; all hashes are right."""
    if rng.random() < 0.2:
        index = rng.randrange(len(files) - 1)
        return with_header(files, index, _edited(rng, header_of(files[rank_file(index)])[0]))
    if rng.random() < 0.1:
        name = rng.choice(("torch", "python", "numpy"))
        return with_data(files, "rng", name, lambda raw: _scribble(rng, raw))
    return {**files, MANIFEST: seal(_edited(rng, unseal(files[MANIFEST])))}


def _scribble(rng: random.Random, raw: bytearray) -> None:
    for _ in range(rng.choice((1, 8, 64))):
        raw[rng.randrange(rng.choice((64, len(raw))))] = rng.choice((0, 1, 127, 255))
    if rng.random() < 0.3:
        raw[-16:] = rng.randbytes(16)


def _edited(rng: random.Random, tree: Tree) -> Tree:
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        # Each field is as likely as any other, though some occur in every tensor.
        where = rng.choice(sorted({where for _, _, where in places}))
        holder, key, _ = rng.choice([place for place in places if place[2] == where])
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == 2:
            other, name, _ = rng.choice([place for place in places if place[2] == where])
            holder[key], other[name] = other[name], holder[key]
        elif kind == 3:
            other, name, _ = rng.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif kind == 4 and isinstance(holder[key], int):
            holder[key] += rng.choice((-1, 1, 1000))
        elif kind == 5 and isinstance(holder, dict):
            holder[rng.choice(("x", "step", "lr", "exp_avg", "scale", "python", "seen", ""))] = rng.choice(HOSTILE)
        else:
            holder[key] = rng.choice(HOSTILE)
        if not tree:
            break
    return tree


def _places(tree: Tree, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield every holder and key of a tree, and a name of the field that is the same for like fields."""
    pairs = list(enumerate(tree)) if isinstance(tree, list) else list(tree.items()) if isinstance(tree, dict) else []
    for key, item in pairs:
        inner = f"{where}.{'*' if isinstance(tree, list) else key}"
        yield tree, key, inner
        yield from _places(item, inner)


def mutations(seed: int, count: int, files: Files, other: Files) -> Iterator[tuple[str, Files]]:
    """Yield damaged copies of a checkpoint, each with what makes it again."""
    for number in range(seed, seed + count):
        rng = random.Random(number)
        change = flip if rng.random() < 0.4 else edit
        yield f"{change.__name__} {number}", change(rng, files, other)


def main(folder: Path, megabytes: int, seed: int, count: int) -> None:
    """Load damaged checkpoints with little memory; print what was touched."""
    import resource

    rank = Rank({"data": LocalComm()})
    rank.save(folder, "good")
    rank.step(2)
    rank.save(folder, "other")
    files, other = read_files(folder / "good"), read_files(folder / "other")
    rank.attempt(folder, "good")
    touched: set[str] = set()
    watched = ("exec", "compile", "os.system", "subprocess.Popen", "os.remove", "os.rename", "ctypes.dlopen", "socket")
    is_on = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_on and (event in watched or event.startswith(("pickle", "shutil", "os.spawn", "os.exec", "import"))):
            touched.add(f"{event} {str(args)[:200]}")
        if is_on and event == "open":
            touched.add(f"open {args[0]} {args[2]:#x}")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (megabytes << 20),) * 2)
    sys.addaudithook(hook)
    told = []
    target = folder / "bad"
    for what, damaged in mutations(seed, count, files, other):
        write_files(target, damaged)
        is_on = True
        said = rank.attempt(folder, "bad")
        is_on = False
        told.append(said)
        assert "MemoryError" not in said, (what, said)
        assert said or rank.attempt(folder, "good", moves=False) == ""
    assert rank.attempt(folder, "good") == ""
    print(json.dumps({"touched": sorted(touched), "refused": sum(bool(each) for each in told)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
