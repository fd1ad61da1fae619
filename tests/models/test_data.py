import hashlib
import sysconfig
from pathlib import Path

import pytest
import torch

from shardwise.data import batch, load_stdlib
from shardwise.errors import ConfigError

TEXT = torch.arange(1000) % 251


def cut(seed: int = 1, step: int = 2, rank: int = 3, batch_size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(TEXT, seed=seed, step=step, rank=rank, batch_size=batch_size, length=16)


def test_corpus_is_whole_files_up_to_the_wanted_bytes() -> None:
    corpus = load_stdlib(200_000)
    assert corpus.tokens.dtype == torch.uint8
    assert corpus.tokens.shape == (corpus.num_bytes,)
    assert corpus.num_bytes >= 200_000
    assert corpus.sha256 == hashlib.sha256(corpus.tokens.numpy().tobytes()).hexdigest()
    assert 1 < corpus.num_files < load_stdlib(400_000).num_files


def test_corpus_is_the_same_every_time() -> None:
    assert load_stdlib(100_000).sha256 == load_stdlib(100_000).sha256


def test_corpus_starts_with_the_first_file_of_the_library() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    first = (root / "__future__.py").read_bytes()
    assert load_stdlib(1).tokens.numpy().tobytes() == first


def test_corpus_leaves_out_tests_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a/c.py", "a/tests/d.py", "test/e.py", "site-packages/f.py", "g.txt", "a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} ")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert load_stdlib().tokens.numpy().tobytes() == b"a.py a/c.py b.py "


def test_library_without_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match="no Python source"):
        load_stdlib()


def test_target_is_the_token_after_each_input() -> None:
    inputs, targets = cut()
    assert inputs.shape == targets.shape == (5, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 251, targets)


def test_windows_depend_on_seed_step_and_rank_only() -> None:
    torch.manual_seed(1)
    first = cut()
    torch.manual_seed(2)
    assert torch.equal(first[0], cut()[0])
    for other in (cut(seed=9), cut(step=9), cut(rank=9), cut(seed=2, step=1)):
        assert not torch.equal(first[0], other[0])


def test_windows_reach_both_ends_of_the_text() -> None:
    inputs, targets = batch(TEXT[:18], seed=0, step=0, rank=0, batch_size=64, length=16)
    assert set(inputs[:, 0].tolist()) == {0, 1}
    assert targets.max() == 17


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 16 tokens"):
        batch(TEXT[:16], seed=0, step=0, rank=0, batch_size=1, length=16)
