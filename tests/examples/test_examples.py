"""Each example in its short form, as its first lines say it is run."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.timeout(300)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"step +\d+  loss ([\d.]+)", output)]


def test_loop_trains(tmp_path: Path) -> None:
    output = run([*TORCHRUN, str(EXAMPLES / "loop.py"), "--steps", "12"], tmp_path)
    first, *_, last = losses(output)
    assert last < first - 0.3
    assert "1,271,808 numbers in 77 tensors" in output


def test_engine_trains_with_the_deepspeed_file_beside_it(tmp_path: Path) -> None:
    output = run([*TORCHRUN, str(EXAMPLES / "engine.py"), "--steps", "11"], tmp_path)
    first, last = losses(output)
    assert last < first - 0.3
    assert "step 10  lr 0.0009" in output  # steps_per_print
    assert "11 updates, 176 samples, 0 skipped" in output


def test_pretraining_file_is_read_by_shardwise_train(tmp_path: Path) -> None:
    short = ["train.steps=2", "train.eval_batches=1", "train.sample_tokens=8"]
    options = [word for setting in short for word in ("--set", setting)]
    command = [sys.executable, "-m", "shardwise.cli", "train", str(EXAMPLES / "pretrain.toml"), *options]
    output = run(command, tmp_path)
    assert "stage 3 on 2 ranks" in output
    assert json.loads((tmp_path / "runs" / "pretrain" / "summary.json").read_text())["steps"] == 2


def test_fine_tuning_runs_or_says_why_not(tmp_path: Path) -> None:
    has_it = importlib.util.find_spec("transformers") is not None
    launcher = TORCHRUN if has_it else [sys.executable]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / "finetune_hf.py"), "--steps", "11"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    if has_it:
        first, last = losses(done.stdout)
        assert last < first
    else:
        assert re.match(r'not run: No module named .transformers.; pip install -e "\.\[hf\]" in the clone', done.stdout)


def test_every_example_is_tested() -> None:
    named = Path(__file__).read_text()
    files = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")]
    assert sorted(files) == ["engine.py", "finetune_hf.py", "loop.py", "pretrain.toml"]
    assert all(f'"{name}"' in named for name in files)
