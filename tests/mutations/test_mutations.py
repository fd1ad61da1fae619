"""Breaking any verb, wait or rule of the core fails the fast thread subset. The list is ``mutations.toml``.

A survivor is a missing test, not a reason to shorten the list.
"""

import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "src" / "shardwise"
FAST_SUBSET = (
    "tests/threads/test_core_smoke.py",
    "tests/lanes",
    "tests/cases/test_held_weights.py",
    "tests/cases/test_divergence.py",
    "tests/cases/test_activation_checkpoints.py",
)
LIMIT_SECONDS = 600.0  # of one run of the subset; much more than it takes, a test that hangs ends by its own timeout
NUM_WORKERS = 2

MUTATIONS: list[dict[str, str]] = tomllib.loads((HERE / "mutations.toml").read_text())["mutation"]
TESTS_FAILED = 1  # pytest's exit code

Outcome = dict[str, Any]


def run_all(
    mutations: Sequence[dict[str, str]], on_end: Callable[[str, Outcome], None] = lambda breaks, outcome: None
) -> dict[str, Outcome]:
    """Run the fast subset once per mutation, a few at a time; by what each breaks."""
    outcomes: dict[str, Outcome] = {}
    waiting = list(mutations)[::-1]
    lock = threading.Lock()

    def serve() -> None:
        command = [sys.executable, str(HERE / "worker.py")]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            while True:
                with lock:
                    if not waiting:
                        break
                    mutation = waiting.pop()
                change = {key: mutation[key] for key in ("file", "old", "new")} if "old" in mutation else {}
                job = {"package": str(PACKAGE), "mutation": change, "tests": FAST_SUBSET, "limit": LIMIT_SECONDS}
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.flush()
                outcome = json.loads(worker.stdout.readline())
                outcomes[mutation["breaks"]] = outcome
                on_end(mutation["breaks"], outcome)

    threads = [threading.Thread(target=serve) for _ in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of the mutations that were selected."""
    chosen = {item.callspec.params["mutation"]["breaks"] for item in request.session.items if is_mutation_test(item)}
    return run_all([{"breaks": "nothing"}, *(each for each in MUTATIONS if each["breaks"] in chosen)])


def is_mutation_test(item: pytest.Item) -> bool:
    return item.name.startswith(test_fast_subset_notices.__name__) and hasattr(item, "callspec")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["breaks"])
def test_mutation_changes_one_place(mutation: dict[str, str]) -> None:
    text = (PACKAGE / mutation["file"]).read_text()
    assert text.count(mutation["old"]) == 1, "the source changed: point the mutation at what does this now"
    changed = text.replace(mutation["old"], mutation["new"])
    assert changed != text
    compile(changed, mutation["file"], "exec")


def test_mutations_break_different_things() -> None:
    assert len({mutation["breaks"] for mutation in MUTATIONS}) == len(MUTATIONS)
    assert len({(mutation["file"], mutation["old"], mutation["new"]) for mutation in MUTATIONS}) == len(MUTATIONS)
    assert len(MUTATIONS) >= 40


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_fast_subset_passes_on_the_sources_as_they_are(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["nothing"]["code"] == 0, outcomes["nothing"]["log"]


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["breaks"])
def test_fast_subset_notices(mutation: dict[str, str], outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[mutation["breaks"]]
    # Failed tests, a crash, or no end: all are noticed. Errors in collecting tests (2) or in their use (4) are not.
    noticed = outcome["code"] is None or outcome["code"] == TESTS_FAILED or outcome["code"] < 0
    assert noticed, f"survived (exit code {outcome['code']}): nothing fails without {mutation['breaks']}"
