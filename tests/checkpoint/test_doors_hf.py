"""Hugging Face's safetensors, out and in."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint.doors.huggingface import export_huggingface, import_huggingface
from shardwise.checkpoint.manifest import Manifest
from shardwise.comm.base import Comm
from shardwise.errors import CheckpointError, ConfigError
from shardwise.precision import Precision
from shardwise.testing.ranks import run_ranks

from .case import assert_same, same_bits, tree
from .doors_case import load_odd, plain_odd, save_odd

INDEX = "model.safetensors.index.json"


def load_folder(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of an export."""
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def masters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("master")}


@pytest.mark.parametrize("num_bytes", [1 << 30, 700])
def test_export_holds_every_weight_once_and_loads_into_the_plain_model(tmp_path: Path, num_bytes: int) -> None:
    _, expected = save_odd(tmp_path / "run")
    assert export_huggingface(tmp_path / "run" / "a", tmp_path / "out", max_shard_bytes=num_bytes) == tmp_path / "out"
    found = load_folder(tmp_path / "out")
    assert_same(found, {name: tensor for name, tensor in expected.items() if name != "head.weight"})
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    if num_bytes == 700:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert files == sorted({*index["weight_map"].values(), INDEX})
        assert len(files) > 3
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / "out" / file)
        for file in files[:-1]:
            tensors = load_file(tmp_path / "out" / file)
            assert sum(tensor.nbytes for tensor in tensors.values()) <= num_bytes or len(tensors) == 1
    else:
        assert files == ["model.safetensors"]
        net = plain_odd()
        assert load_model(net, tmp_path / "out" / "model.safetensors") == (set(), [])
        assert_same(net.state_dict(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_export_rounds_parameters_only(tmp_path: Path, dtype: torch.dtype) -> None:
    state, expected = save_odd(tmp_path / "run")
    export_huggingface(tmp_path / "run" / "a", tmp_path / "out", dtype=dtype)
    found = load_folder(tmp_path / "out")
    for name in masters(state):
        assert same_bits(found[name.removeprefix("master ")], state[name].to(dtype))
    for name in ("table", "count", "norm.running_mean"):
        assert same_bits(found[name], expected[name])


def test_export_of_a_bf16_model_is_what_it_computes_with(tmp_path: Path) -> None:
    state, expected = save_odd(tmp_path / "run", dtype=torch.bfloat16)
    export_huggingface(tmp_path / "run" / "a", tmp_path / "out", dtype=torch.bfloat16)
    found = load_folder(tmp_path / "out")
    export_huggingface(tmp_path / "run" / "a", tmp_path / "full")
    full = load_folder(tmp_path / "full")
    for name in masters(state):
        plain = name.removeprefix("master ")
        assert same_bits(found[plain], expected[plain])
        assert same_bits(full[plain], state[name])


@pytest.mark.parametrize("num_bytes", [1 << 30, 700])
def test_export_comes_back_as_it_was(tmp_path: Path, num_bytes: int) -> None:
    state, expected = save_odd(tmp_path / "run")
    export_huggingface(tmp_path / "run" / "a", tmp_path / "out", max_shard_bytes=num_bytes)
    path = import_huggingface(tmp_path / "out", tmp_path / "in", step=5)
    assert path == tmp_path / "in" / "step-5"
    assert (tmp_path / "in" / "latest").read_text() == "step-5\n"
    found, kept = load_odd(tmp_path / "in", "step-5", weights_only=True)
    assert_same(masters(found), masters(state))
    assert_same(kept, expected)


def test_files_of_others_load_by_name_with_tied_and_foreign_dtypes(tmp_path: Path) -> None:
    net = plain_odd().to(torch.bfloat16)
    save_model(net, str(tmp_path / "model.safetensors"))
    import_huggingface(tmp_path / "model.safetensors", tmp_path / "in", "x", buffers=["table"])
    found, _ = load_odd(tmp_path / "in", "x", weights_only=True)
    for name, param in net.named_parameters():
        assert same_bits(found[f"master {name}"], param.detach().float())


def test_weights_alone_are_refused_where_an_optimizer_wants_its_state(tmp_path: Path) -> None:
    save_odd(tmp_path / "run", num_ranks=1)
    export_huggingface(tmp_path / "run" / "a", tmp_path / "out")
    import_huggingface(tmp_path / "out", tmp_path / "in", "x")
    with pytest.raises(CheckpointError, match="pass optimizer_state=False"):
        load_odd(tmp_path / "in", "x", num_ranks=1)
    load_odd(tmp_path / "in", "x", num_ranks=1, optimizer_state=False)


def test_nothing_is_written_from_a_damaged_checkpoint_or_over_something(tmp_path: Path) -> None:
    save_odd(tmp_path / "run", num_ranks=1)
    before = tree(tmp_path)
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        export_huggingface(tmp_path / "run" / "a", tmp_path / "taken")
    (tmp_path / "taken").rmdir()
    file = tmp_path / "run" / "a" / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="is damaged: its hash"):
        export_huggingface(tmp_path / "run" / "a", tmp_path / "out")
    assert tree(tmp_path) == before


def raw_file(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[" * 100_000,
        {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},
        {"w": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}},
        {"__metadata__": {"shardwise.buffers": "[1]"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {},
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, header: Any) -> None:
    raw_file(tmp_path / "bad.safetensors", header, bytes(8) if header else b"")
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        import_huggingface(tmp_path / "bad.safetensors", tmp_path / "in")
    assert tree(tmp_path) == {"bad.safetensors"}


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "", "a\0b", "a\\b", "no.safetensors"])
def test_index_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "x")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match=r"no file of this folder|cannot be read"):
        import_huggingface(tmp_path / "src", tmp_path / "in")


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"weight_map": 3}'])
def test_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        import_huggingface(tmp_path, tmp_path / "in")


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"a": "one", "b": "one"}, r"b is not in one\.safetensors"),
        ({"a": "one", "b": "two", "c": "two"}, r"c is not in two\.safetensors"),
        ({"a": "one", "b": "two"}, r"does not say that d is in two\.safetensors"),
        ({"a": "one", "b": "two", "d": "one"}, r"d is not in one\.safetensors"),
        ({"a": "one", "b": 3}, "has no weight_map"),
    ],
)
def test_index_and_files_must_agree(tmp_path: Path, places: dict[str, Any], words: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2), "d": torch.zeros(2)}, tmp_path / "two.safetensors")
    names = {name: f"{file}.safetensors" if isinstance(file, str) else file for name, file in places.items()}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=words):
        import_huggingface(tmp_path, tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_a_buffer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"buffer 'nosuch': .*model\.safetensors has no such tensor"):
        import_huggingface(tmp_path / "model.safetensors", tmp_path / "in", buffers=["nosuch"])


@pytest.mark.parametrize("alias", ["x\x1b[2J", "x" * 5000])
def test_other_names_that_no_manifest_holds_are_refused(tmp_path: Path, alias: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", metadata={alias: "w"})
    with pytest.raises(CheckpointError, match=r"a.safetensors: w: aliases.0: String should") as caught:
        import_huggingface(tmp_path / "a.safetensors", tmp_path / "in")
    assert str(caught.value).isprintable()


def test_import_of_a_name_that_is_taken_changes_nothing(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    import_huggingface(tmp_path, tmp_path / "in", "x")
    before = Manifest.decode((tmp_path / "in" / "x" / "manifest.json").read_bytes(), "x")
    with pytest.raises(CheckpointError, match="exists already"):
        import_huggingface(tmp_path, tmp_path / "in", "x")
    assert Manifest.decode((tmp_path / "in" / "x" / "manifest.json").read_bytes(), "x") == before


@pytest.mark.needs_peer("transformers")
@pytest.mark.parametrize(("dtype", "num_bytes"), [(None, 1 << 30), (torch.bfloat16, 20_000)])
def test_from_pretrained_computes_the_same(tmp_path: Path, dtype: torch.dtype | None, num_bytes: int) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(12).view(2, 6)

    def body(mesh: Mapping[str, Comm]) -> Tensor:
        sharded = shardwise.shard(net, dict(mesh), stage=3, precision=Precision(param=dtype), units=nn.Linear)
        optimizer = shardwise.shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=0.01), sharded)
        sharded(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shardwise.save_checkpoint(sharded, tmp_path / "run", tag="a")
        with torch.no_grad():
            return sharded(input_ids=tokens).logits

    expected = run_ranks(1, body)[0]
    export_huggingface(tmp_path / "run" / "a", tmp_path / "out", dtype=dtype, max_shard_bytes=num_bytes)
    config.save_pretrained(tmp_path / "out")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=dtype or torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, expected)
