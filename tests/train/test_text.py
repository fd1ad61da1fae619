"""Files to documents, documents to tokens, tokens to micro-batches."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.config.model import DataConfig
from shardwise.data import find_files, read_documents
from shardwise.errors import ConfigError
from shardwise.train.text import NOT_A_TARGET, DocumentText, PackedText, Text, is_packed, read_text
from shardwise.train.tokens import ByteTokenizer, load_tokenizer


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def read(path: Path, *, length: int = 8, **options: object) -> Text:
    data = DataConfig.model_validate({"path": [str(path)]} | options)
    return read_text(data, ByteTokenizer(), length=length, seed=1)


def test_folder_is_read_in_the_order_of_names_without_hidden_and_binary_files(tmp_path: Path) -> None:
    write(
        tmp_path, {"b.txt": "bb", "a/z.md": "zz", "a/.git/x": "x", ".hidden": "h", "a/pic.bin": b"\x89\0", "e.txt": ""}
    )
    found = read_documents([str(tmp_path)])
    assert found.texts == (b"bb", b"zz")
    assert found.names == (str(tmp_path / "b.txt"), str(tmp_path / "a/z.md"))
    assert (found.num_files, found.num_bytes, found.not_text) == (3, 4, (str(tmp_path / "a/pic.bin"),))


def test_documents_of_jsonl_are_the_texts_of_its_lines(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": lines("one", "", "tw\u00f6") + "\n"})
    found = read_documents([str(tmp_path / "a.jsonl")])
    assert found.texts == (b"one", "tw\u00f6".encode())
    assert found.names[1].endswith("a.jsonl:3")


def test_digest_of_text_tells_where_documents_end(tmp_path: Path) -> None:
    digests = set()
    for number, texts in enumerate([("ab", "c"), ("a", "bc"), ("abc",)]):
        write(tmp_path, {f"{number}.jsonl": lines(*texts)})
        digests.add(read_documents([str(tmp_path / f"{number}.jsonl")]).sha256)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "nothing", r"no file or folder"),
        ({".hidden": "x"}, ".", r"no files in"),
        ({"a.txt": ""}, "a.txt", r"there is no text"),
        ({"a.bin": b"a\0b"}, "a.bin", r"a\.bin holds a zero byte"),
        ({"a.jsonl": '{"text": "x"}\n{'}, "a.jsonl", r"a\.jsonl:2: is not JSON"),
        ({"a.jsonl": "[1]"}, "a.jsonl", r"a\.jsonl:1: expected an object .* got a list"),
        ({"a.jsonl": '{"body": "x"}'}, "a.jsonl", r"data\.field: .*no text under 'text'; the line has 'body'"),
        ({"a.jsonl": '{"text": 1}'}, "a.jsonl", r"no text under 'text'"),
        ({"a.jsonl": b'{"text": "\xff"}'}, "a.jsonl", r"a\.jsonl:1: is not JSON"),
        ({"a.txt": "x" * 15}, "a.txt", r"data: 7 of 16 tokens are left for training"),
        ({"a.jsonl": lines("x" * 30)}, "a.jsonl", r"left in the held-out part of 1 documents"),
    ],
)
def test_text_that_cannot_be_used_is_refused_by_name(
    files: dict[str, str | bytes], path: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path, files)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / path)


@pytest.mark.parametrize(
    ("files", "pack", "packed"),
    [
        ({"a.txt": "x"}, None, True),
        ({"a.jsonl": "x"}, None, False),
        ({"a.jsonl": "x", "b.txt": "x"}, None, True),
        ({"a.jsonl": "x"}, True, True),
        ({"a.txt": "x"}, False, False),
    ],
)
def test_only_jsonl_alone_is_not_packed(
    files: dict[str, str | bytes], pack: bool | None, packed: bool, tmp_path: Path
) -> None:
    write(tmp_path, files)
    assert is_packed(DataConfig(path=[str(tmp_path)], pack=pack)) is packed
    assert is_packed(DataConfig(path=str(tmp_path), pack=pack)) is packed


def all_bytes(source: PackedText) -> bytes:
    return source.tokens.numpy().tobytes()


def test_packed_text_holds_out_blocks_and_loses_nothing(tmp_path: Path) -> None:
    text = bytes(torch.randint(1, 256, (10_000,), generator=torch.Generator().manual_seed(0)).tolist())
    write(tmp_path, {"a.txt": text})
    read_ = read(tmp_path, held_out=0.1, length=8)
    assert isinstance(read_.training, PackedText)
    assert isinstance(read_.held_out, PackedText)
    assert (read_.num_tokens, read_.packed) == (10_001, True)  # one byte ends the file
    held_out = all_bytes(read_.held_out)
    assert len(held_out) == pytest.approx(1000, abs=16 * 9)
    assert sorted(all_bytes(read_.training) + held_out) == sorted(text + b"\0")
    block = held_out[: len(held_out) // 6]
    assert block in text  # six blocks, each in a row
    assert held_out[: len(block) + 1] not in text


def test_short_text_holds_out_one_window(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "x" * 19})
    text = read(tmp_path, length=8)
    assert isinstance(text.held_out, PackedText)
    assert text.held_out.tokens.numel() == 9
    assert text.held_out.spread(number=0, count=1, size=2)[0].shape == (2, 8)


def test_windows_of_packed_text_are_followed_by_their_targets(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": bytes(range(1, 251)) * 4})
    source = read(tmp_path, held_out=0.05).training
    inputs, targets = source.micro_batch(number=3, rank=1, num_ranks=2, size=5)
    assert inputs.shape == targets.shape == (5, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    again = source.micro_batch(number=3, rank=1, num_ranks=2, size=5)
    other = source.micro_batch(number=3, rank=0, num_ranks=2, size=5)
    assert torch.equal(inputs, again[0])
    assert not torch.equal(inputs, other[0])


def test_evaluation_spreads_from_the_first_window_to_the_last() -> None:
    source = PackedText(tokens=torch.arange(101), length=10, seed=0)
    windows = torch.cat([source.spread(number=number, count=2, size=2)[0] for number in range(2)])
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert source.spread(number=0, count=1, size=1)[1].tolist() == [list(range(1, 11))]


def targets_of(pair: tuple[Tensor, Tensor]) -> list[bytes]:
    return [bytes(row[row != NOT_A_TARGET].tolist()) for row in pair[1]]


def test_documents_are_padded_cut_and_ended(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": lines("ab", "x" * 12, "c")})
    source = read(tmp_path, held_out=0.0, length=8).training
    assert isinstance(source, DocumentText)
    inputs, targets = pair = source.spread(number=0, count=1, size=4)
    assert inputs.shape == targets.shape == (4, 8)
    assert targets_of(pair) == [b"b\0", b"x" * 8, b"xxx\0", b"\0"]
    assert inputs[0].tolist() == [*b"ab", *[0] * 6]
    assert targets[0].tolist() == [*b"b\0", *[NOT_A_TARGET] * 6]


def test_every_document_comes_once_per_epoch_over_all_ranks(tmp_path: Path) -> None:
    texts = [f"{number:03d}" for number in range(12)]
    write(tmp_path, {"a.jsonl": lines(*texts)})
    source = read(tmp_path, held_out=0.0, length=8).training
    epochs = []
    for epoch in range(2):
        seen = []
        for number in range(2):
            for rank in range(2):
                inputs, _ = source.micro_batch(number=2 * epoch + number, rank=rank, num_ranks=2, size=3)
                seen += [bytes(row[:3].tolist()).decode() for row in inputs]
        epochs.append(seen)
    assert sorted(epochs[0]) == sorted(epochs[1]) == texts
    assert epochs[0] != epochs[1]


def test_held_out_documents_are_spread_over_all(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": lines(*(f"{number:03d}" for number in range(20)))})
    text = read(tmp_path, held_out=0.25)
    assert isinstance(text.training, DocumentText)
    assert isinstance(text.held_out, DocumentText)
    assert [start // 4 for start, _ in text.held_out.ranges] == [3, 7, 11, 15, 19]
    assert len(text.training.ranges) == 15


def test_default_text_is_the_library_as_it_is() -> None:
    text = read_text(DataConfig(), ByteTokenizer(), length=128, seed=0)
    assert text.packed
    assert text.num_bytes == text.num_tokens > 3_000_000
    assert len(text.sha256) == len(hashlib.sha256().hexdigest())


@pytest.mark.parametrize(
    ("name", "end", "message"),
    [("nothing.json", None, r"there is no file"), ("bytes", "</s>", r"data\.end_token: is for a tokenizer\.json")],
)
def test_tokenizer_that_cannot_be_used_is_refused(name: str, end: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(name, end)


def test_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", absent)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"needs the package tokenizers.*install it, or the extra hf"):
        load_tokenizer(str(tmp_path), None)


@pytest.mark.needs_peer("tokenizers")
def test_tokenizer_file_encodes_decodes_and_knows_its_end(tmp_path: Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(str(tmp_path), None)
    assert (found.vocab, found.end) == (4, 2)
    assert found.encode(b"a b a", "text").tolist() == [0, 1, 0]
    assert found.decode([0, 1]) == "a b"
    with pytest.raises(ConfigError, match=r"t\.txt is not UTF-8"):
        found.encode(b"\xff", "t.txt")
    with pytest.raises(ConfigError, match=r"has no token '<eos>'"):
        load_tokenizer(str(tmp_path), "<eos>")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer"):
        load_tokenizer(str(tmp_path), None)


def test_files_are_named_for_a_home_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.txt": "x"})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(["~/a.txt"]) == [tmp_path / "a.txt"]
