"""The manifest of a checkpoint: what is in it, in global coordinates, and the hash of each piece. Pure: no tensors.

docs/checkpoint-format.md describes the file for whoever writes a reader of their own.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from shardwise.checkpoint.names import is_tag, rank_file
from shardwise.errors import CheckpointError
from shardwise.layout import range_to_boxes

__all__ = [
    "DTYPES",
    "FORMAT_VERSION",
    "Box",
    "FileFacts",
    "Group",
    "Kind",
    "Manifest",
    "OptimizerFacts",
    "Param",
    "Piece",
    "Stored",
    "Values",
    "merge",
]

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 28  # reading takes about twenty times as much memory
_MAX_RANKS = 100_000
_MAX_GENERATOR_BYTES = 1 << 20
MAX_DIMS = 32
MAX_COUNT = 1 << 62

# Names of dtypes in safetensors files.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "U16": torch.uint16,
        "U32": torch.uint32,
        "U64": torch.uint64,
        "BOOL": torch.bool,
    }
)

_COMPLEX = ("F64", "F32", "F16")  # dtypes of parts

Kind = Literal["param", "compute", "optim", "buffer", "rng"]
Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # names go to terminals
Name = Text
Dims = Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]
Box = tuple[Dims, Dims]  # offset and size, one number per dimension each
WHOLE_COPIES = ("buffer", "rng")  # kinds of which ranks may hold unlike values


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Version(BaseModel):
    """All that is read of a manifest before its version is known."""

    model_config = ConfigDict(extra="ignore", strict=True)
    version: Count


class Piece(_Strict):
    """A part of one tensor, as one entry of one file: the boxes follow each other, each in row-major order."""

    file: Count
    boxes: tuple[Box, ...]
    hash: Hash


class Stored(_Strict):
    """One tensor of the whole model.

    Attributes:
        kind: "param": the parameter as the optimizer keeps it; "compute": its rounded copy, only where that is not the
            rounded parameter; "optim": element-wise state of an optimizer; "buffer", "rng": of a rank each.
        name: of the parameter or buffer; of the generator.
        aliases: other names of a buffer; those of a parameter are told with it.
        is_complex: whether the last dimension of a buffer holds real and imaginary parts.
        state: name of the optimizer's state, else empty.
        optimizer: number of the optimizer, 0 for other kinds.
    """

    kind: Kind
    name: Name
    aliases: tuple[Name, ...] = ()
    is_complex: bool = False
    state: Name = ""
    optimizer: Count = 0
    shape: Dims
    dtype: Text
    pieces: tuple[Piece, ...]

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write as readers know it that were made before there were these two fields."""
        fields: dict[str, Any] = handler(self)
        return {key: value for key, value in fields.items() if value or key not in ("aliases", "is_complex")}

    @property
    def key(self) -> str:
        """Name of the entry in the files."""
        if self.kind == "optim":
            return f"optim.{self.optimizer}.{self.state}.{self.name}"
        return f"{self.kind}.{self.name}"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return self.numel * DTYPES[self.dtype].itemsize

    def range_of(self, piece: Piece) -> tuple[int, int]:
        """Return the row-major range ``[start, stop)`` that the boxes of a piece cover.

        Raises:
            CheckpointError: they cover no such range, or lie outside the tensor.
        """
        if not piece.boxes:
            return 0, 0
        offset, numel = piece.boxes[0][0], sum(math.prod(size) for _, size in piece.boxes)
        start = 0
        for position, length in zip(offset, self.shape, strict=False):
            start = start * length + position
        if start + numel > self.numel or list(piece.boxes) != range_to_boxes(self.shape, start, start + numel):
            raise CheckpointError(f"{self.key}: boxes {str(piece.boxes)[:200]} are no run of elements of {self.shape}")
        return start, start + numel


class FileFacts(_Strict):
    """A file of the checkpoint: its length, and the hash of its header with the 8 bytes before it."""

    bytes: Count
    header: Hash


class Param(_Strict):
    """A parameter of the model.

    Attributes:
        dtype: in which the model computes with it.
        aliases: its other names (tied weights).
        trainable: whether it trained.
    """

    name: Name
    shape: Dims
    dtype: Text
    aliases: tuple[Name, ...] = ()
    trainable: bool = True


class Group(_Strict):
    """A group of an optimizer: names of its parameters, and its options as ``plain.py`` writes them."""

    params: tuple[Name, ...]
    options: dict[str, Any]


class OptimizerFacts(_Strict):
    """An optimizer.

    Attributes:
        class_name: name of its class.
        groups: its groups.
        scalars: by parameter, what state is one value.
        other: state under keys that are no parameters.
    """

    class_name: Text
    groups: tuple[Group, ...]
    scalars: dict[Name, dict[Name, Any]]
    other: dict[Name, Any] = Field(default_factory=dict)


class Values(_Strict):
    """What a rank holds beside tensors; mappings hold what ``plain.py`` writes.

    Attributes:
        num_steps: steps of optimizers so far.
        loss_scale: state of the loss scale, None without one.
        optimizers: in the order in which they were sharded.
        extra_state: of modules that have one.
        objects: states of schedulers, loaders, ... by name.
        generators: of random generators, what is no tensor.
        user: what the user added.
    """

    num_steps: Count
    loss_scale: dict[str, float] | None
    optimizers: tuple[OptimizerFacts, ...]
    extra_state: dict[Name, Any]
    objects: dict[Name, Any]
    generators: dict[Name, Any]
    user: Any = None


RankValues = dict[Literal["extra_state", "objects", "generators"], dict[str, Any]]


class Manifest(_Strict):
    """Everything about a checkpoint but the numbers in its tensors.

    Attributes:
        format: "shardwise".
        version: of the format.
        save_id: drawn anew for every save; each file repeats it.
        tag: name of the checkpoint.
        step: updates so far.
        time: when it was written, UTC, ISO 8601.
        library: versions of what wrote it.
        mesh: axes with their number of ranks, outermost first; for information.
        sharding: for information.
        params: in the order of the model.
        stored: the tensors.
        files: of rank 0, 1, ...
        values: what all ranks hold beside tensors, as ``plain.py`` writes it.
        rank_values: where a rank holds other values than rank 0; as many as there are ranks, empty where it does not.
    """

    format: Literal["shardwise"] = "shardwise"
    version: int
    save_id: Hash
    tag: str
    step: Count
    time: Text
    library: dict[Text, Text]
    mesh: tuple[tuple[Text, Count], ...]
    sharding: Text
    params: tuple[Param, ...]
    stored: tuple[Stored, ...]
    files: Annotated[tuple[FileFacts, ...], Field(min_length=1, max_length=_MAX_RANKS)]
    values: Values
    rank_values: tuple[RankValues, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks that saved."""
        return len(self.files)

    @cached_property
    def by_key(self) -> dict[str, Stored]:
        """The tensors by the name of their entries."""
        return {item.key: item for item in self.stored}

    def values_of(self, rank: int) -> Values:
        """Return what a rank held beside tensors; rank 0's for ranks that did not exist."""
        if rank >= self.num_ranks or not self.rank_values[rank]:
            return self.values
        return self.values.model_copy(update={str(key): value for key, value in self.rank_values[rank].items()})

    def encode(self) -> bytes:
        """Return the file: a JSON object whose first line holds the hash of all between its first and last line."""
        body = self.model_dump_json(exclude_defaults=False).encode()
        digest = xxhash.xxh3_128_hexdigest(body)
        return f'{{"hash":"{digest}","manifest":\n'.encode() + body + b"\n}\n"

    @staticmethod
    def decode(raw: bytes, where: str) -> "Manifest":
        """Read what ``encode`` wrote, and check everything that can be checked without the other files.

        Raises:
            CheckpointError: it is damaged, of another format, or contradicts itself.
        """
        if len(raw) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{where}: has {len(raw):,} bytes, more than the {MAX_MANIFEST_BYTES:,} it may")
        first, _, rest = raw.partition(b"\n")
        body, _, last = rest.rpartition(b"\n}")
        if not first.startswith(b'{"hash":"') or last.strip():
            raise CheckpointError(f"{where}: is no manifest of a checkpoint, or was cut off")
        if first != f'{{"hash":"{xxhash.xxh3_128_hexdigest(body)}","manifest":'.encode():
            raise CheckpointError(f"{where}: is damaged: its hash does not fit its text")
        try:
            version = _Version.model_validate_json(body).version
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"{where}: is of version {version!r} of the format, this library reads {FORMAT_VERSION}"
                )
            manifest = Manifest.model_validate_json(body)
        except (ValidationError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{where}: {_first_line(error)}") from None
        manifest.check(where)
        return manifest

    def check(self, where: str) -> None:
        """Check that the parts fit each other.

        Raises:
            CheckpointError: names the first part that does not.
        """
        if not is_tag(self.tag):
            raise CheckpointError(f"{where}: {self.tag!r} is no tag")
        if len(self.rank_values) != self.num_ranks:
            raise CheckpointError(f"{where}: has values of {len(self.rank_values)} ranks and {self.num_ranks} files")
        if len(self.by_key) != len(self.stored):
            raise CheckpointError(f"{where}: a tensor occurs twice")
        total = sum(file.bytes for file in self.files)
        dtypes = set(DTYPES)
        for item in self.stored:
            if item.dtype not in dtypes or item.num_bytes > total:
                raise CheckpointError(f"{where}: {item.key} is of dtype {item.dtype} and shape {item.shape}")
            if item.is_complex and (item.kind != "buffer" or item.shape[-1:] != (2,) or item.dtype not in _COMPLEX):
                raise CheckpointError(f"{where}: {item.key} is not complex: {item.dtype} of shape {item.shape}")
            if item.kind == "rng" and item.num_bytes > _MAX_GENERATOR_BYTES:
                raise CheckpointError(f"{where}: {item.key} has {item.num_bytes} bytes")
            files = {piece.file for piece in item.pieces}
            if len(files) != len(item.pieces) or max(files, default=0) >= self.num_ranks:
                raise CheckpointError(f"{where}: {item.key} lies twice in a file, or in one that does not exist")
            problem = _coverage(item)
            if problem:
                raise CheckpointError(f"{where}: {item.key}: {problem}")
        names = [name for param in self.params for name in (param.name, *param.aliases)]
        if len(set(names)) != len(names):
            raise CheckpointError(f"{where}: a parameter occurs twice")
        names = [name for item in self.stored if item.kind == "buffer" for name in (item.name, *item.aliases)]
        if len(set(names)) != len(names) or any(item.aliases for item in self.stored if item.kind != "buffer"):
            raise CheckpointError(f"{where}: a buffer occurs twice, or what is no buffer has other names")
        shapes = {param.name: param.shape for param in self.params}
        for item in self.stored:
            if item.kind in ("param", "compute", "optim") and shapes.get(item.name) != item.shape:
                raise CheckpointError(f"{where}: {item.key} has no parameter of its shape")
            if item.optimizer >= max(len(self.values.optimizers), 1):
                raise CheckpointError(f"{where}: {item.key} is of an optimizer that does not exist")
        for param in self.params:
            item_of = self.by_key.get(f"param.{param.name}")
            if item_of is None or item_of.shape != param.shape or param.dtype not in dtypes:
                raise CheckpointError(f"{where}: parameter {param.name} has no tensor of its shape")

    def file_name(self, index: int) -> str:
        """Return the name of a file."""
        return rank_file(index)


def _coverage(item: Stored) -> str:
    """Say what is wrong with the pieces of a tensor; "compute" may have holes."""
    ranges = [item.range_of(piece) for piece in item.pieces]
    if item.numel == 0:
        return ""
    if item.kind in WHOLE_COPIES:
        return "" if ranges and all(found == (0, item.numel) for found in ranges) else "a copy is not whole"
    position = 0
    for start, stop in sorted(ranges):
        if start < position or (start > position and item.kind != "compute"):
            return f"its elements from {min(start, position)} are covered twice or not at all"
        position = stop
    if position != item.numel and item.kind != "compute":
        return f"its elements from {position} to {item.numel} are missing"
    return ""


def _first_line(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"is malformed at {'.'.join(map(str, first['loc'])) or 'the top'}: {first['msg']}"
    return f"is malformed: {type(error).__name__}: {str(error)[:200]}"


def merge(parts: Sequence[Sequence[Stored]]) -> tuple[Stored, ...]:
    """Join what each rank stored: the pieces of one tensor come together, in the order of the ranks."""
    merged: dict[str, list[Stored]] = {}
    for items in parts:
        for item in items:
            merged.setdefault(item.key, []).append(item)
    return tuple(
        items[0].model_copy(update={"pieces": tuple(piece for item in items for piece in item.pieces)})
        for items in merged.values()
    )
