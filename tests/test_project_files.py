"""Files around the package: the installation without CUDA, citation, pre-commit and CI agree with pyproject.toml."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU = [line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if not line.startswith("#")]


def requirements(lines: list[str]) -> dict[str, str]:
    """Distribution -> versions, without markers."""
    parts = [line.partition(";")[0].replace(" ", "") for line in lines]
    return {re.split("[<>=!]", part)[0]: re.sub("^[a-z-]+", "", part) for part in parts}


def built_requirements(folder: Path, **environment: str) -> dict[str, str]:
    """What the package requires if it is built with `environment`, without extras."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(folder)]
    clean = {key: value for key, value in os.environ.items() if key != "VITCOMPRESS_CPU"}
    subprocess.run(command, cwd=ROOT, env={**clean, **environment}, check=True, capture_output=True)
    lines = (folder / "vitcompress.egg-info" / "PKG-INFO").read_text().splitlines()
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return requirements([line for line in needed if "extra ==" not in line])


def test_the_requirements_without_cuda_are_those_of_the_package() -> None:
    options = [line for line in CPU if line.startswith("-")]
    assert options[0] == "--index-url https://download.pytorch.org/whl/cpu"  # the build without CUDA is preferred
    listed = requirements([line for line in CPU if not line.startswith(("-", "."))])
    package = requirements(PROJECT["dependencies"])
    assert set(listed) == {"torch", "torchvision", "onnxruntime"} and "onnxruntime-gpu" in package
    assert listed["torch"] == package["torch"] and listed["torchvision"] == package["torchvision"]
    assert listed["onnxruntime"] == package["onnxruntime-gpu"]
    assert ".[demo]" in CPU


def test_the_package_without_cuda_requires_one_onnx_runtime(tmp_path: Path) -> None:
    usual, cpu = built_requirements(tmp_path), built_requirements(tmp_path, VITCOMPRESS_CPU="1")
    assert "onnxruntime-gpu" in usual and "onnxruntime-gpu" not in cpu
    assert set(cpu) == set(usual) - {"onnxruntime-gpu"} | {"onnxruntime"}
    listed = requirements(CPU)["onnxruntime"]
    assert set(cpu["onnxruntime"].split(",")) == set(listed.split(","))


def test_the_readme_shows_the_installation_without_cuda_beside_the_first_command() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("    pip install '.[demo]' &&"))
    assert "VITCOMPRESS_CPU=1 pip install -r requirements-cpu.txt" in lines[first + 1]


def test_the_citation_has_the_version_and_license_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["title"].split(": ")[0] == PROJECT["name"]


def test_ci_and_pre_commit_run_the_checks_of_the_project() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["checks"]
    assert job["steps"][-1]["run"] == ".ci/run" and os.access(ROOT / ".ci/run", os.X_OK)
    assert all(
        f"Programming Language :: Python :: {v}" in PROJECT["classifiers"] for v in job["strategy"]["matrix"]["python"]
    )
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    script = (ROOT / ".ci/run").read_text()
    for hook in local["hooks"]:
        assert hook["name"] in script and hook["entry"].startswith(hook["name"])


@pytest.mark.parametrize("name", ["SECURITY.md", "CITATION.cff", ".pre-commit-config.yaml"])
def test_no_address_is_invented(name: str) -> None:
    assert not re.search(r"https?://|@[a-z]+\.", (ROOT / name).read_text())
