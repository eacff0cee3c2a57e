"""Imports point one way, and each library has one door."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "vitcompress": "vitcompress",
    "exporters": "vitcompress.exporters",
    "bench": "vitcompress.bench",
    "recipes": "vitcompress.recipes",
}

# A module imports from its own level or from levels before it.
LEVELS = [
    {"__init__", "errors", "paths", "progress", "recipes", "tables", "wording"},
    {"assignments", "frozen", "gpus", "installed", "problems", "plan", "families.anatomy"},
    {"families"},
    {
        "augmentation",
        "budget",
        "checkpoint",
        "cost",
        "data",
        "distill",
        "distributed",
        "evaluate",
        "export_options",
        "file_contents",
        "byte_input",
        "channel_gates",
        "gates",
        "precision",
        "ranges",
        "loaders",
        "models",
        "onnx_file",
        "optimization",
        "posterize",
        "resampling",
        "runlog",
        "sidecar",
        "sources",
        "standard",
        "surgery",
        "train",
        "train_options",
        "learner",
        "workspace",
    },
    {
        "methods",
        "verify",
        "error_bounds",
        "planned_costs",
        "planned_sizes",
        "rounding",
        "verdicts",
        "verify_engine",
        "verify_fold",
        "verify_onnx",
        "verify_slice",
        "verify_weights",
    },
    {"recipe", "exporters"},
    {"keys"},
    {"bench"},
    {"pipeline"},
    {"study"},
    {"console"},
    {"cli"},
    {"__main__"},
]
# Of the core, only these may import exporters and bench.
ABOVE_EXPORTERS_AND_BENCH = {"pipeline", "study", "cli", "bench"}
DOORS = {
    "timm": {
        "families",
        "models",
        "augmentation",
        "data",
        "sources",
        "loaders",
        "train",
        "learner",
        "optimization",
        "distill",
        "evaluate",
        "bench",
    },
    "rich": {"console"},
    "click": {"cli"},
    "pydantic": {"recipe", "problems", "sidecar", "study"},
    "tomli_w": {"recipe"},
    "onnxruntime": {"exporters", "verify_onnx"},
}
# The distribution that brings a library, where its name is another.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "google": "protobuf",
    "pydantic_core": "pydantic",  # which pins it to one version
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
}


def modules() -> dict[str, Path]:
    """Name inside vitcompress -> file, as in `families.vit`, `exporters.onnx_graph`."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts
            found[".".join(parts[1:])] = path
    return found


MODULES = modules()


def part(module: str) -> str:
    """What of `LEVELS` and `DOORS` speaks for a module: its own name, else its package's."""
    return module if any(module in level for level in LEVELS) else module.split(".")[0]


def level(module: str) -> int:
    for number, names in enumerate(LEVELS):
        if part(module) in names:
            return number
    raise AssertionError(f"{module} has no level: give it a place in LEVELS")


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
def test_imports_point_one_way(module: str) -> None:
    path = MODULES[module]
    for name in imports(path, at_import=True):
        target = own(name)
        if target is not None and part(target) != part(module):
            assert level(target) <= level(module), f"{module} imports {target}, which comes after it"


@pytest.mark.parametrize("module", MODULES)
def test_only_pipeline_and_cli_know_exporters_and_bench(module: str) -> None:
    for name in imports(MODULES[module]):
        target = part(own(name) or "")
        if target in ("exporters", "bench") and target != part(module):
            assert part(module) in ABOVE_EXPORTERS_AND_BENCH, f"{module} imports {target}"


@pytest.mark.parametrize("module", MODULES)
def test_every_library_has_its_door(module: str) -> None:
    for name in imports(MODULES[module]):
        library = name.split(".")[0]
        if library in DOORS:
            assert part(module) in DOORS[library], f"{module} imports {library}, only {sorted(DOORS[library])} may"


def declared() -> set[str]:
    """Distributions that pyproject.toml asks for: what users get, with or without an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in extras.keys() - {"test", "dev"} for line in extras[name])]
    return {re.split(r"[\[<>=; ]", line)[0] for line in wanted}


@pytest.mark.parametrize("module", MODULES)
def test_every_imported_library_is_asked_for_by_name(module: str) -> None:
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
    assert own("vitcompress.cli.main") == "cli" and level("cli") > level("plan")


def test_no_module_is_named_after_a_library_it_imports() -> None:
    for module, path in MODULES.items():
        last = module.split(".")[-1]
        assert all(name.split(".")[0] != last for name in imports(path)), f"{module} shadows {last}"


@pytest.mark.parametrize(
    "package",
    [
        "vitcompress",
        "vitcompress.errors",
        "vitcompress.plan",
        "vitcompress.recipes",
        "vitcompress.console",
        "vitcompress.cli",
    ],
)
def test_the_light_modules_import_nothing_heavy(package: str) -> None:
    heavy = "{'torch', 'timm', 'numpy', 'onnx', 'pydantic', 'PIL', 'onnxruntime'}"
    code = f"import sys, {package}; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
