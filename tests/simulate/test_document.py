"""What `docs/simulate.md` shows is what its snippets print."""

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "simulate.md"


def test_snippets_print_what_the_document_says() -> None:
    text = DOCUMENT.read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    shown = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(snippets) == len(shown) == 2
    command = [sys.executable, "-W", "error", "-c", "print('--')\n".join(snippets)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("--\n") == shown
