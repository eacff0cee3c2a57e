"""Files in int8 on the kernels for AVX2, which add products in 16 bits, on a processor that has newer ones, too."""

from pathlib import Path

import avx2
import pytest

TESTS = [str(Path(__file__).with_name(name)) for name in ("test_quantize.py", "test_openvino_int8.py")]


@pytest.mark.skipif(not avx2.AVAILABLE, reason="needs gdb on x86-64")
def test_files_in_int8_pass_their_tests_with_avx2(tmp_path: Path) -> None:
    """Only files with weights of 8 bits for ONNX Runtime and OpenVINO saturate, and are expected to."""
    log = tmp_path / "log.txt"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *TESTS, "-k", "agree or saturat"]
    with log.open("w") as stream:
        code = avx2.run(words, stdout=stream, stderr=stream)
    assert code == 0 and "12 passed" in log.read_text(), log.read_text()
