"""scripts/size counts what it says it counts."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "size"

CODE = '''"""Head."""

import os  # a comment


class Box:
    """Doc."""

    width: int

    def grow(self):
        """Doc
        of two lines.
        """
        self.height = 1
        self.width = 2


def short():
    return os
'''


def test_size_counts_code_without_comments_and_docstrings() -> None:
    size = runpy.run_path(str(SCRIPT))["measure"](CODE)
    assert size.num_lines == 20
    assert size.num_code_lines == 8
    assert (size.longest_lines, size.longest_name) == (6, "grow")
    assert (size.most_attributes, size.most_name) == (2, "Box")
    assert size.num_tokens == 2 + 3 + 3 + 6 + 5 + 5 + 5 + 2
