"""What docs/four-questions.md shows is what the planner answers."""

import doctest
import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "four-questions.md"
TEXT = DOCUMENT.read_text()
SESSION = re.compile(r"^```pycon\n(.*?)^```", re.DOTALL | re.MULTILINE)


def failures(text: str) -> str:
    """Run a document's sessions one after the other in one namespace; return what doctest says against them."""
    said: list[str] = []
    sessions = "\n".join(SESSION.findall(text))
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(doctest.DocTestParser().get_doctest(sessions, {}, DOCUMENT.name, None, 0), out=said.append)
    return "".join(said)


QUESTIONS = {
    "7.5 billion parameters on 64 ranks": "[120.0, 31.4, 16.6, 1.9]",
    "1 billion parameters on 8 ranks": "[16.0, 5.5, 3.8, 2.0]",
    "8 billion parameters on two cards with 24 GB": "[128.5, 80.3, 72.3, 64.2]",
    "175 billion parameters on 1,024 ranks": "[2800.0, 702.1, 352.4, 2.7]",
}


def test_every_answer_is_what_the_planner_gives() -> None:
    assert failures(TEXT) == ""


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_has_states_and_a_budget(question: str) -> None:
    answer = TEXT.partition(f"## {question}\n")[2].partition("\n## ")[0]
    shown = "\n".join(SESSION.findall(answer))
    assert QUESTIONS[question] in shown
    assert "fits(" in shown


def test_wrong_answer_is_noticed() -> None:
    assert "Got:\n    [120.0, 31.4, 16.6, 1.9]" in failures(
        TEXT.replace("[120.0, 31.4, 16.6, 1.9]", "[120.0, 31.4, 16.6, 1.8]")
    )
