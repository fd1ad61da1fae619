"""What construction takes: this rank's share and one parameter, measured by the operating system in fresh processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = Path(__file__).parent / "measure.py"


def measure(how: str, *, width: int, depth: int, vocab: int, num_ranks: int = 8) -> dict[str, int]:
    command = [sys.executable, str(MEASURE), how, *map(str, (width, depth, vocab, num_ranks))]
    # glibc otherwise keeps freed blocks of up to 32 MiB, which a small model consists of
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    assert found["measured"] == found["shards"]  # the ledger, and the plan
    return found


def grown(found: dict[str, int]) -> int:
    return found["peak"] - found["baseline"]


def test_construction_takes_the_shard_and_one_parameter() -> None:
    found = measure("deferred", width=384, depth=10, vocab=4096)
    assert found["model"] > 4 * (found["shards"] + found["largest"])
    assert grown(found) < 1.2 * (found["shards"] + found["largest"])


@pytest.mark.matrix
def test_ordinary_construction_takes_the_whole_model() -> None:
    found = measure("ordinary", width=384, depth=10, vocab=4096)
    assert grown(found) > found["model"]


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not Path("/proc/meminfo").exists() or available_bytes() < 3 << 30, reason="needs 3 GiB of free memory"
)
def test_model_of_1_3_billion_parameters_takes_the_shard_and_one_parameter() -> None:
    found = measure("deferred", width=2048, depth=24, vocab=50257)
    assert found["model"] > 4 * 1.3e9
    assert found["peak"] < 1.2 * (found["baseline"] + found["shards"] + found["largest"])
    assert grown(found) < 1.2 * (found["shards"] + found["largest"])
