"""The documentation runs: commands parse, Python blocks are executed, every recipe is explained."""

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from vitcompress import cli, recipes
from vitcompress.errors import VitcompressError
from vitcompress.exporters.runtimes import EXPORTERS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("[a-z]*/**/README.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TESTED = "pip install -e '.[test,dev]' && pytest"
FIRST = "pip install '.[demo]' && vitcompress recipe digits_hetdpt --export onnx"


def comment(name: str) -> str:
    """The comment a recipe opens with."""
    lines = recipes.text(name).splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def parses(line: str) -> None:
    """Let click parse a command line as a shell would give it, without running it."""
    words = shlex.split(line)
    command: click.Command = cli.main
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert command is not cli.main, f"unknown command: {line}"
    with command.make_context("vitcompress", words):
        pass


def shell_lines(text: str) -> list[str]:
    """The `vitcompress ...` commands of indented blocks, without what a shell takes away."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return [
        re.split(r" [>&|]", part.split("vitcompress ", 1)[1])[0]
        for line in lines
        for part in line.split("&&")
        if part.strip().startswith(("vitcompress ", "torchrun "))
    ]


@pytest.mark.parametrize("name", sorted(cli.main.commands))
def test_every_command_is_documented(name: str) -> None:
    assert f"`vitcompress {name}" in README


@pytest.mark.parametrize(("command", "option"), [("recipe", "export"), ("export", "format")])
def test_help_and_readme_name_every_format(command: str, option: str) -> None:
    (text,) = (p.help for p in cli.main.commands[command].params if isinstance(p, click.Option) and p.name == option)
    for name in EXPORTERS:
        assert name in re.split("[ ,.]+", str(text)) and f"| `{name}` |" in README


@pytest.mark.parametrize("line", shell_lines(README))
def test_every_command_line_of_the_readme_parses(line: str) -> None:
    parses(line)


def test_the_check_of_command_lines_sees_mistakes() -> None:
    assert len(shell_lines(README)) >= 6
    for wrong in ("recip digits_hetdpt", "recipe digits_hetdpt --exprot onnx", "recipe"):
        with pytest.raises((AssertionError, click.UsageError, VitcompressError)):
            parses(wrong)


def test_ci_runs_the_second_command_of_the_readme() -> None:
    assert f"    {FIRST}\n" in README and f"    {TESTED}\n" in README and TESTED in CONTRIBUTING
    assert TESTED in (ROOT / ".ci" / "run").read_text()


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "out" / "model.onnx").is_file()


@pytest.mark.parametrize("name", [str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_exist(name: str) -> None:
    """To files, and to headings in them by the anchors that GitHub gives these."""
    path = ROOT / name
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8")):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], anchor


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_starts_with_a_comment_with_its_command(name: str) -> None:
    lines = [line.removeprefix("#").strip() for line in comment(name).splitlines()]
    own = [line for line in lines if re.match(rf"vitcompress recipe {name}( |$)", line)]
    assert own, f"{name} does not say how it is run"
    for line in own:
        parses(line.removeprefix("vitcompress "))


@pytest.mark.parametrize("name", [name for name in recipes.names() if not name.startswith(("digits_", "tinted_"))])
def test_published_figures_are_quoted_with_their_hardware(name: str) -> None:
    table = tomllib.loads(recipes.text(name))["published"]
    assert table["hardware"] and table["source"]
    figures = [key for key in ("top1", "params_m", "macs_g", "images_per_second", "speedup") if key in table]
    assert "top1" in figures
    for key in figures:
        assert str(table[key]) in comment(name), f"{key} of {name} differs from the comment"
    assert table["hardware"].split()[1] in comment(name)
    assert "published throughput" not in recipes.text(name) or "images_per_second" in table


def test_all_recipe_files_are_seen() -> None:
    files = {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.toml")}
    studies = {Path("studies", f"{name}.toml") for name in recipes.study_names()}
    assert files == {Path(f"{name}.toml") for name in recipes.names()} | studies


def test_the_changelog_has_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_documentation_has_no_local_paths() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "bench").rglob("*.md"), *(ROOT / "recipes").glob("*.toml")]:
        assert not re.search(r"(^|[\s(\"'])/(work|tmp|home|root|opt)/", path.read_text()), path.name
