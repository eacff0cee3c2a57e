"""The software bill of materials of a run folder, in CycloneDX 1.6: https://cyclonedx.org/docs/1.6/json."""

from itertools import chain
from pathlib import Path

from vitcompress.bench.report.records import Report
from vitcompress.errors import MissingExtraError
from vitcompress.exporters.doctor import LIBRARIES, PACKAGES
from vitcompress.exporters.runtimes import exported_files
from vitcompress.io.files import file_sha256
from vitcompress.io.hardware import package_versions
from vitcompress.io.run_folder import RunFolder

try:
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL
except ModuleNotFoundError:
    raise MissingExtraError("cyclonedx-python-lib", "sbom", need="an SBOM") from None


def build_sbom(folder: Path, report: Report) -> str:
    """The model of a run and the source of its weights, its files with their SHA-256, and the installed versions of the
    packages that write and run them, as JSON.
    """
    files, about = RunFolder(folder), {**(report.get("model") or {}), **report}
    names = [name for name in ("arch", "weights", "weights_sha256", "dense_sha256", "plan_sha256") if about.get(name)]
    properties = [Property(name=f"vitcompress:{name}", value=str(about[name])) for name in names]
    kind, model = ComponentType.MACHINE_LEARNING_MODEL, report["recipe"]
    bom, components = Bom(), list[Component]()
    bom.metadata.component = Component(type=kind, name=model, bom_ref="model", properties=properties)
    starts = tuple(f"{path.stem}." for model in ("model", "dense") for path in exported_files(folder, model))
    exports = (path for path in folder.iterdir() if path.name.startswith(starts))
    for path in sorted({files.plan, files.weights, files.standard, *exports}):
        if path.is_file():
            sha256 = HashType(alg=HashAlgorithm.SHA_256, content=file_sha256(path))
            components.append(Component(type=ComponentType.FILE, name=path.name, bom_ref=path.name, hashes=[sha256]))
    for name, version in package_versions(("vitcompress", *LIBRARIES, *chain(*PACKAGES.values()))).items():
        purl = PackageURL("pypi", name=name, version=version)
        components.append(Component(name=name, version=version, purl=purl, bom_ref=str(purl)))
    bom.components.update(components)
    bom.register_dependency(bom.metadata.component, components)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
