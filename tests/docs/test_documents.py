"""What the documents name exists, and what they show runs."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import shardwise
from shardwise.cli.main import app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
USERS_FILES = ("example.py", "train.py", "config.toml", "settings.toml")
EXAMPLES = ("README.md", "docs/get-started.md")


def title(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=title)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def code_of(text: str) -> Iterator[str]:
    """Yield every line of a fenced block and every code span."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    for span in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        yield " ".join(span.split())


def missing_files(text: str, folder: Path) -> list[str]:
    """Return the files and folders named in a document that do not exist."""
    named = set(re.findall(r"(?<![\w/.:-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|txt))\b(?!/)", text))
    named |= {span for span in code_of(text) if re.fullmatch(r"[\w.]+(/[\w.]+)*/?", span) and "/" in span}
    named -= {name for name in named if "NNNN" in name or name in USERS_FILES}
    places = (ROOT, PACKAGE, folder)
    return sorted(name for name in named if not any((place / name).exists() for place in places))


def unknown_targets(text: str) -> list[str]:
    """Return the make targets named in a document that the Makefile does not have."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {match[1] for line in code_of(text) if (match := re.match(r"make ([\w-]+)", line))}
    return sorted(named - targets)


def unknown_commands(text: str) -> list[str]:
    """Return the commands and options of the command line named in a document that it does not have."""
    program = typer.main.get_command(app)
    unknown = []
    for line in code_of(text):
        match = re.match(r"shardwise ([a-z]+)(.*)", line)
        if match is None:
            continue
        command = getattr(program, "commands", {}).get(match[1])
        if hasattr(command, "commands"):  # a group of commands
            command = command.commands.get(match[2].split()[0] if match[2].split() else "", command)
        options = {"--help"} | {option for param in getattr(command, "params", ()) for option in param.opts}
        if command is None or set(re.findall(r"--[\w-]+", match[2])) - options:
            unknown.append(line)
    return unknown


def dead_links(text: str, folder: Path) -> list[str]:
    """Return the relative links of a document that lead nowhere."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    return [link for link in links if not link.startswith("https://") and not (folder / link).exists()]


@every_document
def test_named_files_exist(document: Path) -> None:
    assert missing_files(document.read_text(), document.parent) == []


@every_document
def test_named_make_targets_exist(document: Path) -> None:
    assert unknown_targets(document.read_text()) == []


@every_document
def test_named_commands_exist(document: Path) -> None:
    assert unknown_commands(document.read_text()) == []


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    assert dead_links(document.read_text(), document.parent) == []


@every_document
def test_prose_is_ascii(document: Path) -> None:
    assert document.read_text().isascii()


@every_document
def test_snippets_compile(document: Path) -> None:
    for number, block in enumerate(blocks(document.read_text(), "python")):
        compile(block, f"{title(document)}:python block {number}", "exec")


@pytest.mark.parametrize("document", EXAMPLES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_first_example_runs(document: str, num_ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks((ROOT / document).read_text(), "python")[0])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run([*torchrun, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.count("loss") >= 5


def test_snippets_of_the_reference_run(tmp_path: Path) -> None:
    script = tmp_path / "reference.py"
    script.write_text("\n".join(blocks((ROOT / "docs" / "reference.md").read_text(), "python")))
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reference_lists_the_public_names() -> None:
    headings = re.findall(r"^### `([\w.]+)", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(name for name in shardwise.__all__ if name != "__version__")


def test_documents_named_in_the_code_exist() -> None:
    named = {name for source in PACKAGE.rglob("*.py") for name in re.findall(r"docs/[\w./-]+\.md", source.read_text())}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_changelog_has_an_unreleased_section() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_checkers_fail_on_a_document_that_is_wrong() -> None:
    text = "\n".join(
        [
            "Read `nowhere.py`, `tests/nowhere` and [this](nowhere.md). Run `make nothing`, then:",
            "```",
            "shardwise nothing --at-all",
            "shardwise demo --no-such-option",
            "```",
        ]
    )
    assert missing_files(text, ROOT) == ["nowhere.md", "nowhere.py", "tests/nowhere"]
    assert unknown_targets(text) == ["nothing"]
    assert unknown_commands(text) == ["shardwise nothing --at-all", "shardwise demo --no-such-option"]
    assert dead_links(text, ROOT) == ["nowhere.md"]
