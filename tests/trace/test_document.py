"""What `docs/timeline.md` shows is what its snippets print, and its words are those of the files."""

import re
import subprocess
import sys
from pathlib import Path

from shardwise.trace.lines import read_lines

DOCUMENT = Path(__file__).parents[2] / "docs" / "timeline.md"


def test_snippets_print_what_the_document_says(tmp_path: Path) -> None:
    text = DOCUMENT.read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    shown = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(snippets) == 3
    command = [sys.executable, "-W", "error", "-c", "print('--')\n".join(snippets)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("--\n") == [*shown, ""]
    lines = list(read_lines(tmp_path / "timeline" / "timeline-rank-0.jsonl"))
    keys = {key for line in lines for key in line} - {"planned_leaves_out", "measured_leaves_out"}
    documented = set(re.findall(r"`(\w+)", text))
    assert keys - documented - {"collective"} == set()
    assert {line["what"] for line in lines} <= documented
