"""Eight updates are four, a save, new processes, and four more: bit by bit, for everything a run depends on."""

from pathlib import Path

import pytest

from .resume_case import start

CASES = [("bf16", 3, 0), ("fp16", 1, 2)]
ALL = [(kind, a, b) for kind in ("fp32", "fp16", "bf16") for a in range(4) for b in range(4)]


def check(tmp_path: Path, kind: str, first: int, second: int) -> None:
    mode = "first-background" if (first + second) % 2 else "first"
    window = 2 if (first < 2) == (second < 2) else 1  # stages 0 and 1 add micro-batches in another order than 2 and 3
    whole = start(tmp_path, "whole", kind, first, window=window)
    before = start(tmp_path, mode, kind, first, window=window)
    after = start(tmp_path, "second", kind, second, window=window)
    for rank in range(2):
        assert before[rank]["losses"] + after[rank]["losses"] == whole[rank]["losses"]
        assert after[rank]["digest"] == whole[rank]["digest"]
        assert after[rank]["client"] == {"losses": before[0]["losses"]}
    if kind == "fp16":
        assert whole[0]["skipped"] > 0
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"global_step4", "latest"}


@pytest.mark.parametrize(("kind", "first", "second"), CASES)
def test_resume_is_bitwise(kind: str, first: int, second: int, tmp_path: Path) -> None:
    check(tmp_path, kind, first, second)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "first", "second"), ALL)
def test_resume_is_bitwise_between_all_stages(kind: str, first: int, second: int, tmp_path: Path) -> None:
    check(tmp_path, kind, first, second)
