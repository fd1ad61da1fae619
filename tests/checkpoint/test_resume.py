"""Eight updates are four, a save, new processes, and four more: bit by bit, for everything a run depends on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("resume_worker.py")


def start(tmp_path: Path, mode: str, kind: str, stage: int, *, window: int = 2, ranks: int = 2) -> list[dict[str, Any]]:
    """Run processes to their end; return what each tells."""
    rendezvous = tmp_path / f"meet-{mode}"
    with (tmp_path / "output").open("w+") as output:
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    WORKER,
                    *map(str, (rank, ranks, rendezvous, tmp_path / "saved", mode, kind, stage, window)),
                ],
                stdout=output,
                stderr=output,
            )
            for rank in range(ranks)
        ]
        try:
            statuses = [child.wait(timeout=60) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        output.seek(0)
        assert not any(statuses), output.read()
    return [json.loads(Path(f"{rendezvous}.{rank}.json").read_text()) for rank in range(ranks)]


CASES = [("fp32", 3, 0), ("fp16", 2, 2), ("bf16", 1, 3)]
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
