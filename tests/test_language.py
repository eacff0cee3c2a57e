"""Names, comments, docstrings, messages and Markdown avoid the words that CONTRIBUTING.md lists."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\| avoid \| write \|\n\| --- \| --- \|\n((?:\|.*\n)+)", re.MULTILINE)
# Inflected forms of a listed word. `held-out` is a standard term.
ENDINGS = {"judge": r"judg(?:e|es|ed|ing)", "refuse": r"refus(?:e|es|ed|ing|al)", "vouch": r"vouch(?:es|ed|ing)?"}
NAMES = {"told", "said", "asked", "found", "given", "made", "held", "judged", "refused", "vouched"}
STORED_KEYS = {"held_back_by_quota"}  # of files of version 1; no name for new code
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
FOLDERS = ("vitcompress", "exporters", "bench", "recipes", "tests")


def listed() -> list[str]:
    """The words of the first column of the table in CONTRIBUTING.md."""
    match = TABLE.search((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert match is not None
    return [word.strip() for row in match[1].splitlines() for word in row.split("|")[1].split(",")]


# In prose, these are rejected as parts of other phrases only: `given`, `found`, `made` and `held` are common English.
PROSE = [word for word in listed() if word not in ("found", "given", "made", "held")]
PATTERN = re.compile(
    r"(?<![`'\"])\b(?:" + "|".join(ENDINGS.get(word, re.escape(word)) for word in PROSE) + r")\b(?!-out)", re.IGNORECASE
)


def python_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module defines or assigns."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.arg():
                yield node.lineno, node.arg


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and string; strings without a space are keys and file names, not prose."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT or (token.type in STRINGS and " " in token.string):
                yield token.start[0], token.string


def problems_in(path: Path) -> list[str]:
    place = path.relative_to(ROOT)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = [(line, name) for line, name in names(tree) if name not in STORED_KEYS]
    wrong = [f"{place}:{line}: name {name}" for line, name in own if NAMES & set(name.lower().split("_"))]
    wrong += [f"{place}:{line}: {match[0]}" for line, text in prose(path) if (match := PATTERN.search(text))]
    return wrong


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_code_is_written_in_plain_english(path: Path) -> None:
    if path != Path(__file__):
        assert not problems_in(path)


@pytest.mark.parametrize(
    "path", sorted({*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md"), *ROOT.glob("recipes/**/*.toml")}), ids=str
)
def test_documents_are_written_in_plain_english(path: Path) -> None:
    text = TABLE.sub("", path.read_text(encoding="utf-8"))
    assert not [match[0] for match in PATTERN.finditer(text)]


def test_the_rules_see_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "x.py").write_text('found = 1\n"""It is held against the model."""\n# refused\nheld_out = found\n')
    assert [line.split(": ")[1] for line in problems_in(tmp_path / "x.py")] == [
        "name found",
        "name held_out",
        "held against",
        "refused",
    ]
