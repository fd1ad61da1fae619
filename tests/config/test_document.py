"""The table in docs/deepspeed.md is the table in the code."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "deepspeed_table"


def check(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)


def test_table_of_keys_in_the_document_is_fresh() -> None:
    done = check(SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stale_table_is_noticed(tmp_path: Path) -> None:
    for folder in ("scripts", "docs"):
        (tmp_path / folder).mkdir()
    script, document = tmp_path / "scripts" / SCRIPT.name, tmp_path / "docs" / "deepspeed.md"
    script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    text = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    document.write_text(text.replace("| `stage` | same |", "| `stage` | refused |"), encoding="utf-8")
    done = check(script)
    assert (done.returncode, done.stdout) == (1, "docs/deepspeed.md is stale: run scripts/deepspeed_table\n")
