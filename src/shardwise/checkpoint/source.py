"""Reading a checkpoint's tensors by ranges of the whole tensor, whatever the pieces it was saved in."""

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from torch import Tensor

from shardwise.checkpoint.blocks import ReadBlocks
from shardwise.checkpoint.manifest import DTYPES, Manifest, Piece, Stored
from shardwise.checkpoint.tensorfile import TensorFile

__all__ = ["TensorSource"]

_MOST_OPEN = 64


class TensorSource:
    """The files of one checkpoint, opened when they are needed."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        self._shared = ReadBlocks()  # a checkpoint may have very many files

    def __enter__(self) -> "TensorSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()
        self._shared.close()

    def check(self, wanted: Iterable[tuple[Stored, int, int]]) -> None:
        """Check that files and entries of ranges ``(tensor, start, stop)`` are there as the manifest says.

        Raises:
            CheckpointError: one is not.
        """
        for item, start, stop in wanted:
            for piece, first, last in self._pieces(item, start, stop):
                if first < last:
                    begin, end = item.range_of(piece)
                    self._file(piece.file).check_entry(item.key, DTYPES[item.dtype], end - begin)

    def check_copies(self, items: Iterable[Stored], rank: int) -> None:
        """Check that files and entries are there for ``read_copy``.

        Raises:
            CheckpointError: one is not.
        """
        for item in items:
            if item.pieces:
                self._file(_copy_of(item, rank).file).check_entry(item.key, DTYPES[item.dtype], item.numel)

    def read(self, item: Stored, start: int, out: Tensor) -> None:
        """Fill ``out`` [n] with the elements from ``start`` on; what no piece holds stays as it is.

        Raises:
            CheckpointError: a file cannot be read.
        """
        for piece, first, last in self._pieces(item, start, start + out.numel()):
            begin, _ = item.range_of(piece)
            self._file(piece.file).read(item.key, first - begin, out[first - start : last - start])

    def read_copy(self, item: Stored, rank: int, out: Tensor) -> None:
        """Fill ``out`` [numel] with the copy of one rank, or with the first one where that rank has none."""
        if item.pieces:
            self._file(_copy_of(item, rank).file).read(item.key, 0, out)

    def _pieces(self, item: Stored, start: int, stop: int) -> Iterable[tuple[Piece, int, int]]:
        for piece in item.pieces:
            begin, end = item.range_of(piece)
            first, last = max(begin, start), min(end, stop)
            if first < last:
                yield piece, first, last

    def _file(self, index: int) -> TensorFile:
        if index not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            manifest = self.manifest
            self._open[index] = TensorFile(
                self.path, manifest.file_name(index), manifest.files[index], manifest.save_id, shared=self._shared
            )
        self._open.move_to_end(index)
        return self._open[index]


def _copy_of(item: Stored, rank: int) -> Piece:
    """Return the copy of one rank, or the first one where that rank has none."""
    return next((piece for piece in item.pieces if piece.file == rank), item.pieces[0])
