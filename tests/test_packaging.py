"""What reaches site-packages, and that a checkout works without being installed."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOMES = {
    "vitcompress": "vitcompress",
    "exporters": "vitcompress/exporters",
    "bench": "vitcompress/bench",
    "recipes": "vitcompress/recipes",
}
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", "runs", ".*")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources alone, without what earlier builds left in the working tree."""
    copy = tmp_path_factory.mktemp("clean") / "checkout"
    copy.mkdir()
    for folder in HOMES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=LEFT_BEHIND)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(checkout)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(out.glob("*.whl"))


def run(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected_files(checkout: Path) -> set[str]:
    return {
        f"{home}/{path.relative_to(checkout / folder).as_posix()}"
        for folder, home in HOMES.items()
        for path in (checkout / folder).rglob("*")
        if path.suffix in (".py", ".toml") or path.name == "py.typed" or path.name.endswith(".schema.json")
    }


def test_the_wheel_holds_every_file_and_no_other(checkout: Path, wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected_files(checkout)
    assert "vitcompress/recipes/digits_hetdpt.toml" in packed and "vitcompress/bench/__init__.py" in packed


def test_only_vitcompress_reaches_site_packages(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vitcompress"}


def test_the_license_is_packed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import vitcompress, vitcompress.exporters as e, vitcompress.recipes as r;"
        "from importlib import import_module; b = import_module('vitcompress.bench');"
        "print(vitcompress.__file__, b.__file__, e.__file__, 'digits_hetdpt' in r.names())"
    )
    *files, is_listed = run("-c", code, cwd=tmp_path, path=tmp_path / "site").split()
    assert all(Path(file).is_relative_to(tmp_path / "site" / "vitcompress") for file in files) and is_listed == "True"


def test_python_m_works_in_a_checkout(checkout: Path) -> None:
    assert "digits_hetdpt" in json.loads(run("-m", "vitcompress", "recipes", "--json", cwd=checkout))
    code = (
        "import vitcompress as v, vitcompress.exporters as e, vitcompress.recipes as r;"
        "print(v.__file__, e.__file__, r.__file__)"
    )
    assert all(Path(file).is_relative_to(checkout) for file in run("-c", code, cwd=checkout).split())


def test_torchrun_works_in_a_checkout_and_one_process_speaks(checkout: Path) -> None:
    out = run(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "vitcompress",
        "recipes",
        "--json",
        cwd=checkout,
    )
    assert "digits_hetdpt" in json.loads(out)
