"""All settings are in pyproject.toml. With VITCOMPRESS_CPU=1 the package requires the CPU build of ONNX Runtime."""

import os

from setuptools import setup
from setuptools.command.egg_info import egg_info


class Requirements(egg_info):
    def finalize_options(self) -> None:
        if os.environ.get("VITCOMPRESS_CPU"):
            lines = [line for line in self.distribution.install_requires if not line.startswith("onnxruntime")]
            lines.append("onnxruntime>=1.25,!=1.27.*")
            self.distribution.install_requires = self.distribution.metadata.install_requires = lines
        super().finalize_options()


setup(cmdclass={"egg_info": Requirements})
