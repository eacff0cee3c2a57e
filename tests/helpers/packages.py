"""Packages that extend vitcompress by entry points, written into a folder for `sys.path`."""

from pathlib import Path


def write_package(folder: Path, kind: str, points: str, **modules: str) -> Path:
    """Write an installed package and return its folder, for `monkeypatch.syspath_prepend`.

    kind: `methods`, `families` or `exporters`. points: lines such as `name = module:OBJECT`. modules: name -> source.
    """
    info = folder / "extension-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extension\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vitcompress.{kind}]\n{points}\n")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    return folder
