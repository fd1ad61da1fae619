"""Starts the ranks of ``resume_worker.py`` and waits for them."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("resume_worker.py")


def run_ranks_of(
    tmp_path: Path,
    mode: str,
    kind: str,
    stage: int,
    *,
    window: int = 2,
    ranks: int = 2,
    variables: Mapping[str, str] | None = None,
) -> tuple[list[int], str]:
    """Run processes to their end; return their exit statuses and what they printed."""
    rendezvous = tmp_path / f"meet-{mode}"
    rendezvous.unlink(missing_ok=True)
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
                env={**os.environ, **(variables or {})},
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
        return statuses, output.read()


def start(tmp_path: Path, mode: str, kind: str, stage: int, **options: Any) -> list[dict[str, Any]]:
    """Run processes that must end well; return what each tells."""
    statuses, output = run_ranks_of(tmp_path, mode, kind, stage, **options)
    assert not any(statuses), output
    return [json.loads((tmp_path / f"meet-{mode}.{rank}.json").read_text()) for rank in range(len(statuses))]
