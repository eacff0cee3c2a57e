"""Imports point one way, and each library has one door."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitcompress

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "vitcompress": "vitcompress",
    "exporters": "vitcompress.exporters",
    "bench": "vitcompress.bench",
    "recipes": "vitcompress.recipes",
}

# Each package imports only from packages before it.
ORDER = (
    "__init__",
    "errors",
    "recipes",
    "plan",
    "io",
    "families",
    "surgery",
    "models",
    "training",
    "exporters",
    "methods",
    "verify",
    "recipe",
    "bench",
    "pipeline",
    "cli",
    "__main__",
)
# Only these packages import the library.
DOORS = {
    "timm": {"families", "models", "training", "bench"},
    "rich": {"cli.output"},
    "click": {"cli"},
    "pydantic": {"recipe", "io", "exporters", "bench.report", "pipeline"},
    "tomli_w": {"recipe"},
    "onnxruntime": {"exporters"},
}
# The distribution that brings a library, where its name is another.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "markdown_it": "markdown-it-py",
    "google": "protobuf",
    "pydantic_core": "pydantic",  # which pins it to one version
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "cyclonedx": "cyclonedx-python-lib",
    "packageurl": "cyclonedx-python-lib",  # which requires it
}


def modules() -> dict[str, Path]:
    """Name inside vitcompress -> file, as in `families.vit`, `exporters.onnx_graph`."""
    modules = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(ROOT / "recipes" / "examples"):  # programs
                continue
            parts = [*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts
            modules[".".join(parts[1:])] = path
    return modules


MODULES = modules()


def package(module: str) -> str:
    """The entry of `ORDER` that a module belongs to."""
    return module.split(".")[0]


def position(module: str) -> int:
    assert package(module) in ORDER, f"{module} has no place in the import order: add its package to ORDER"
    return ORDER.index(package(module))


def imports(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Absolute names imported by a file; with `at_import` only those that are imported when the file is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in top_level(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import: not those in functions or under TYPE_CHECKING."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def own(name: str) -> str | None:
    """The module of ours that an imported name is, or is in: `vitcompress.plan.Plan` -> `plan`."""
    parts = name.split(".")
    if parts[0] != "vitcompress":
        return None
    for end in range(len(parts), 1, -1):
        if ".".join(parts[1:end]) in MODULES:
            return ".".join(parts[1:end])
    return "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_one_order(module: str) -> None:
    lazy = module == "__init__"  # imports public names on first use, and under TYPE_CHECKING for type checkers
    for name in imports(MODULES[module], at_import=lazy):
        target = own(name)
        if target is not None and package(target) != package(module):
            assert position(target) < position(module), f"{module} imports {target}, which comes after it"


@pytest.mark.parametrize("module", MODULES)
def test_only_listed_packages_import_a_library(module: str) -> None:
    for name in imports(MODULES[module]):
        library = name.split(".")[0]
        if library in DOORS:
            allowed = any(module == door or module.startswith(f"{door}.") for door in DOORS[library])
            assert allowed, f"{module} imports {library}, only {sorted(DOORS[library])} may"


def declared() -> set[str]:
    """Distributions that pyproject.toml asks for: what users get, with or without an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in extras.keys() - {"test", "dev"} for line in extras[name])]
    return {re.split(r"[\[<>=; ]", line)[0] for line in wanted}


@pytest.mark.parametrize("module", MODULES)
def test_every_imported_library_is_declared(module: str) -> None:
    libraries = {name.split(".")[0] for name in imports(MODULES[module])} - set(sys.stdlib_module_names)
    for library in libraries - {"vitcompress"}:
        wanted = DISTRIBUTIONS.get(library, library.replace("_", "-"))
        assert wanted in declared(), f"{module} imports {library}, and pyproject.toml does not ask for {wanted}"


def test_no_module_imports_itself_in_a_circle() -> None:
    edges = {
        module: {target for name in imports(path, at_import=True) if (target := own(name)) and target != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_the_rules_see_a_violation(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("def f():\n    import rich\nif TYPE_CHECKING:\n    import timm\nfrom vitcompress.cli import main\n")
    assert set(imports(file)) == {"rich", "timm", "vitcompress.cli.main"}
    assert set(imports(file, at_import=True)) == {"vitcompress.cli.main"}
    assert own("vitcompress.cli.main") == "cli" and position("cli") > position("plan")


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse(MODULES["__init__"].read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    names = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(vitcompress._PUBLIC) == set(vitcompress.__all__) - {"__version__"}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "__getattr__" not in functions, "type checkers would accept any name"


def test_no_module_has_the_dotted_name_of_a_library_it_imports() -> None:
    for module, path in MODULES.items():
        assert all(name.split(".")[0] != module for name in imports(path)), f"{module} shadows a library"


@pytest.mark.parametrize(
    "package",
    [
        "vitcompress",
        "vitcompress.errors",
        "vitcompress.plan",
        "vitcompress.recipes",
        "vitcompress.cli.output.terminal",
        "vitcompress.cli",
    ],
)
def test_the_light_modules_import_nothing_heavy(package: str) -> None:
    assert heavy_imports(package) == []


def test_the_process_of_an_engine_imports_no_models() -> None:
    assert heavy_imports("vitcompress.exporters.tensorrt.worker") == ["numpy", "torch"]


def heavy_imports(package: str) -> list[str]:
    """The libraries that take long to import, of those that the import of `package` loads."""
    heavy = "{'torch', 'timm', 'numpy', 'onnx', 'pydantic', 'PIL', 'onnxruntime'}"
    code = f"import sys, {package}; print(*sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return answer.stdout.split()
