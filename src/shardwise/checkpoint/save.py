"""Saving: every rank writes its part into a private directory, all agree, one rename makes it visible.

``SaveJob.run`` is the whole protocol; it works in the calling thread, or in one of its own beside training
(``background.py``). Whatever goes wrong on any rank, all ranks raise the same error and nothing is visible.
"""

import datetime
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from shardwise.checkpoint.contents import Contents, Part
from shardwise.checkpoint.files import write_whole
from shardwise.checkpoint.folder import (
    clear_leftovers,
    commit,
    find_checkpoints,
    make_temporary,
    read_latest,
    removable,
    remove,
    write_latest,
)
from shardwise.checkpoint.manifest import FileFacts, Manifest, Piece, RankValues, Stored, Values, merge
from shardwise.checkpoint.names import MANIFEST, rank_file, read_small
from shardwise.checkpoint.plain import Plain
from shardwise.checkpoint.tensorfile import Entry, file_bytes, write_file
from shardwise.checkpoint.verify import verify_files
from shardwise.errors import CheckpointError
from shardwise.faults import fault_point
from shardwise.layout import range_to_boxes

__all__ = ["Exchange", "SaveJob", "SaveOptions", "write_contents"]

Exchange = Callable[[str, str], list[str]]  # what is told, this rank's text -> every rank's text
_MAX_INDEX_BYTES = 1 << 30
_SHOWN = 2000
_MOST_REMOVED = 64  # in one save; their names travel as one text


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """What a save shall do; the same on all ranks.

    Attributes:
        folder: of the run's checkpoints.
        tag: name of this one.
        step: updates so far.
        overwrite: whether a checkpoint of this name may be replaced.
        set_latest: whether ``latest`` shall name it.
        keep_last: number of whole checkpoints that stay; None: all.
        keep: tags that always stay.
    """

    folder: Path
    tag: str
    step: int
    overwrite: bool = False
    set_latest: bool = True
    keep_last: int | None = None
    keep: tuple[str, ...] = ()

    @property
    def target(self) -> Path:
        """Directory of the checkpoint."""
        return self.folder / self.tag


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """One save of one rank.

    Attributes:
        mesh: axes with their number of ranks; for information.
        sharding: for information.
        save_id: drawn by rank 0.
    """

    options: SaveOptions
    contents: Contents
    mesh: tuple[tuple[str, int], ...]
    sharding: str
    save_id: str
    rank: int
    num_ranks: int

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank will write."""
        return file_bytes([_entry(part) for part in self._filled], self._metadata)

    def run(self, exchange: Exchange) -> Path:
        """Write, agree, commit; return the checkpoint's directory.

        Raises:
            CheckpointError: some rank could not; the same on all ranks. Nothing new is visible, unless the message says
                that it was saved and only ``latest`` or the removal of older ones failed.
        """
        temporary = self.options.folder / f".tmp-{self.options.tag}-{self.save_id}"
        try:
            self._together(exchange, "the temporary directory", self._begin)
            index = self._together(exchange, "the file of each rank", lambda: self._write(temporary))
            self._together(exchange, "the commit", lambda: self._commit(temporary, index))
        except CheckpointError:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._later(exchange, "`latest` does not name it", self._name_latest)
        self._retain(exchange)
        return self.options.target

    def _together(self, exchange: Exchange, what: str, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's part; raise on all ranks if one failed; return what each returned (JSON)."""
        problem, result = "", None
        try:
            result = work()
        except Exception as error:
            problem = describe(error)
        answers = [json.loads(text) for text in exchange(what, json.dumps([problem[:_SHOWN], result]))]
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            raise CheckpointError(
                f"checkpoint {self.options.tag!r} was not saved in {self.options.folder}. {'; '.join(failed)[:_SHOWN]}"
            )
        return [value for _, value in answers]

    def _begin(self) -> None:
        if self.rank == 0:
            clear_leftovers(self.options.folder)
            make_temporary(self.options.folder, self.options.tag, self.save_id)
            fault_point("save.tmp_made", self.rank)

    def _write(self, temporary: Path) -> str:
        """Write this rank's tensors and its index; return the hash of the index."""
        path = temporary / rank_file(self.rank)
        if self.rank and not temporary.is_dir():
            raise CheckpointError(f"{temporary} is not there: the folder must be shared by all ranks")
        written = write_file(path, [_entry(part) for part in self._filled], self._metadata)
        fault_point("save.after_first_file", self.rank, path)
        stored = [self._located(part, written.hashes) for part in self.contents.parts]
        index = json.dumps(
            {
                "facts": written.facts.model_dump(),
                "stored": [item.model_dump() for item in stored],
                "values": self.contents.values.model_dump(),
            },
            allow_nan=False,
        ).encode()
        write_whole(temporary / f"index-{self.rank:05d}.json", index)
        return xxhash.xxh3_128_hexdigest(index)

    def _commit(self, temporary: Path, hashes: Sequence[str]) -> None:
        if self.rank:
            return
        indices = [self._read_index(temporary, rank, expected) for rank, expected in enumerate(hashes)]
        manifest = self._manifest(indices)
        fault_point("save.before_manifest", 0)
        raw = manifest.encode()
        Manifest.decode(raw, MANIFEST)  # what cannot be loaded is not saved
        write_whole(temporary / MANIFEST, raw)
        for rank in range(self.num_ranks):
            (temporary / f"index-{rank:05d}.json").unlink()
        fault_point("save.before_rename", 0, temporary / MANIFEST)
        commit(temporary, self.options.target, overwrite=self.options.overwrite)

    def _name_latest(self) -> None:
        if self.rank:
            return
        fault_point("save.after_rename", 0)
        if self.options.set_latest:
            fault_point("save.before_latest", 0)
            write_latest(self.options.folder, self.options.tag, self.save_id)
            fault_point("save.after_latest", 0)

    def _read_index(self, temporary: Path, rank: int, expected: str) -> dict[str, Any]:
        raw = read_small(temporary, f"index-{rank:05d}.json", _MAX_INDEX_BYTES)
        if xxhash.xxh3_128_hexdigest(raw) != expected:
            raise CheckpointError(f"{temporary}: the index of rank {rank} is not what that rank wrote")
        fields: dict[str, Any] = json.loads(raw)
        return fields

    def _manifest(self, indices: Sequence[Mapping[str, Any]]) -> Manifest:
        values = [Values.model_validate_json(json.dumps(index["values"])) for index in indices]
        first = values[0]
        optimizers = tuple(
            facts.model_copy(update={"scalars": _merged([each.optimizers[number].scalars for each in values])})
            for number, facts in enumerate(first.optimizers)
        )
        return Manifest(
            version=1,
            save_id=self.save_id,
            tag=self.options.tag,
            step=self.options.step,
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
            library={"torch": str(torch.__version__)},
            mesh=self.mesh,
            sharding=self.sharding,
            params=self.contents.params,
            stored=merge([[Stored.model_validate_json(json.dumps(i)) for i in index["stored"]] for index in indices]),
            files=tuple(FileFacts.model_validate(index["facts"]) for index in indices),
            values=first.model_copy(update={"optimizers": optimizers}),
            rank_values=tuple(_unlike(each, first) for each in values),
        )

    def _retain(self, exchange: Exchange) -> None:
        """Remove checkpoints that need not stay, if the one just saved can be read back."""
        if self.options.keep_last is None:
            return
        outcome = "older ones were not removed"
        (candidates, *_) = self._later(exchange, outcome, self._candidates)
        if candidates:
            self._later(exchange, outcome, self._read_back)
            self._later(exchange, outcome, lambda: self._remove(candidates))

    def _candidates(self) -> list[str]:
        options = self.options
        if self.rank or options.keep_last is None:
            return []
        named = read_latest(options.folder)  # it may name an older one
        keep = {*options.keep, options.tag, *([named] if named else [])}
        found = find_checkpoints(options.folder)
        return [each.tag for each in removable(found, options.keep_last, keep)][:_MOST_REMOVED]

    def _later(self, exchange: Exchange, outcome: str, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's part of what follows the commit; ``outcome`` is what a failure leaves undone."""
        try:
            return self._together(exchange, outcome, work)
        except CheckpointError as error:
            text = str(error).partition(". ")[2]
            raise CheckpointError(f"checkpoint {self.options.tag!r} was saved, but {outcome}. {text}") from None

    def _read_back(self) -> None:
        verify_files(self.options.target, self.rank, self.num_ranks)

    def _remove(self, tags: Collection[str]) -> None:
        if self.rank == 0:
            for tag in tags:
                remove(self.options.folder / tag, self.save_id)

    @property
    def _filled(self) -> list[Part]:
        return [part for part in self.contents.parts if part.flat.numel()]

    @property
    def _metadata(self) -> dict[str, str]:
        return {"format": "pt", "writer": "shardwise", "save_id": self.save_id, "rank": str(self.rank)}

    def _located(self, part: Part, hashes: Mapping[str, str]) -> Stored:
        if not part.flat.numel():
            return part.stored
        boxes = range_to_boxes(part.stored.shape, part.start, part.start + part.flat.numel())
        piece = Piece(file=self.rank, boxes=tuple(boxes), hash=hashes[part.stored.key])
        return part.stored.model_copy(update={"pieces": (piece,)})


def write_contents(options: SaveOptions, contents: Contents, *, sharding: str = "") -> Path:
    """Write a checkpoint from one process, as importers do; tensors may be memory-mapped files.

    Raises:
        CheckpointError: it was not saved.
    """
    job = SaveJob(
        options=options, contents=contents, mesh=(), sharding=sharding, save_id=new_save_id(), rank=0, num_ranks=1
    )
    return job.run(lambda what, text: [text])


def new_save_id() -> str:
    """Return an identity that no other save has."""
    return uuid.uuid4().hex


def free_bytes(folder: Path) -> int:
    """Return the space on the disk of a folder that may not exist yet."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def describe(error: BaseException) -> str:
    """Return an error in one line, with its class unless it is ours; nothing in it can drive a terminal."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return printable(text)


def printable(text: str) -> str:
    """Return a text of which nothing can drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _entry(part: Part) -> Entry:
    """Return the entry of a part: in its own shape if it is one box, flat otherwise."""
    boxes = range_to_boxes(part.stored.shape, part.start, part.start + part.flat.numel())
    shape = boxes[0][1] if len(boxes) == 1 else (part.flat.numel(),)
    return Entry(key=part.stored.key, shape=shape, flat=part.flat, held=part.held)


def _unlike(values: Values, first: Values) -> RankValues:
    """Return what a rank holds otherwise than rank 0, as a file holds it: there 1, 1.0 and True are three values."""
    found: RankValues = {}
    if json.dumps(values.extra_state) != json.dumps(first.extra_state):
        found["extra_state"] = values.extra_state
    if json.dumps(values.objects) != json.dumps(first.objects):
        found["objects"] = values.objects
    if json.dumps(values.generators) != json.dumps(first.generators):
        found["generators"] = values.generators
    return found


def _merged(tables: Sequence[Mapping[str, Mapping[str, Plain]]]) -> dict[str, dict[str, Plain]]:
    """Join the single values that ranks have of parameters; of those that several have, the first rank's."""
    merged: dict[str, dict[str, Plain]] = {}
    for table in tables:
        for name, states in table.items():
            merged.setdefault(name, dict(states))
    return merged
