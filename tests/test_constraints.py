"""constraints.txt pins every dependency, by version and hash, to what pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "constraints.txt").read_text()
EXTRAS = ("test", "dev", "demo", "openvino", "rtx")  # as in the first line of the file


def pins() -> dict[str, list[str]]:
    versions: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", TEXT, re.MULTILINE):
        versions.setdefault(canonicalize_name(name), []).append(version)
    return versions


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras]


@pytest.mark.parametrize("line", requirements())
def test_every_requirement_is_pinned_within_its_bounds(line: str) -> None:
    requirement = Requirement(line)
    versions = pins().get(canonicalize_name(requirement.name), [])
    assert versions and all(requirement.specifier.contains(version) for version in versions)


def test_every_pin_has_hashes_and_the_file_names_no_host() -> None:
    blocks = re.split(r"^(?=[\w.-]+==)", TEXT, flags=re.MULTILINE)[1:]
    assert len(blocks) > 50 and all("--hash=sha256:" in block for block in blocks)
    assert "://" not in TEXT and "index" not in TEXT.splitlines()[1] and "/" not in TEXT.splitlines()[1]
    assert all(f"--extra {extra}" in TEXT.splitlines()[1] for extra in EXTRAS)
