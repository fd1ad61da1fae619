"""The last line of a test session is the number of tests that did not run."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

SESSION = """
import pytest

def test_runs(): pass

@pytest.mark.matrix
def test_of_the_matrix(): pass

@pytest.mark.needs_peer("no_such_package")
def test_of_a_peer(): raise AssertionError

@pytest.mark.needs_disk(1 << 40)
def test_of_a_disk(): raise AssertionError
"""


def test_session_ends_with_the_number_of_tests_that_did_not_run(tmp_path: Path) -> None:
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_some.py").write_text(SESSION)
    command = [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == "tests that did not run: 3"
    assert "not run:     1  needs the optional package no_such_package" in lines
    assert "not run:     1  large matrix (make test-all)" in lines
