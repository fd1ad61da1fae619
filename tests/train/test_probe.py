"""A run that needs too much memory is told from one that fails for another reason."""

from pathlib import Path

import pytest

from shardwise.config.resolve import Resolved
from shardwise.errors import ConfigError
from shardwise.train.probe import PROBE_SETTINGS, runs_within
from shardwise.train.settings import load_settings

MIB = 1 << 20


def runs(text: Path, *more: str, limit: int = 4096 * MIB) -> bool:
    def settings(folder: str) -> Resolved:
        chosen = [f"data.path={text}", "model.name=gpt-nano", *more, *PROBE_SETTINGS, f"train.output={folder}"]
        return load_settings(None, overrides=chosen, num_ranks=2)

    return runs_within(settings, device_type="cpu", limit_bytes=limit, timeout_seconds=60)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"line {number}" for number in range(5000)))
    return path


def test_memory_decides(text: Path) -> None:
    assert runs(text, "batch.micro=2")
    assert not runs(text, "batch.micro=2048", limit=400 * MIB)


def test_another_failure_is_no_answer(text: Path) -> None:
    with pytest.raises(ConfigError, match="not for want of memory"):
        runs(text, "data.tokenizer=no-such-file.json")
