"""Run Python as on a processor with AVX2 and without AVX-512, VNNI and BF16, at full speed.

    python tests/helpers/avx2.py -m vitcompress doctor

Runtimes choose their kernels by what the instruction `cpuid` reports. gdb stops at each one in ONNX Runtime and
OpenVINO, removes the newer instruction sets from its result, and lets the process go on: the kernels for AVX2 run on
the real processor. vitcompress reads /proc/cpuinfo without their flags. Child processes see the real processor.
"""

import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import gdb  # inside gdb only
except ImportError:
    gdb = None

CPUID = b"\x0f\xa2"
LIBRARIES = ("onnxruntime_pybind11", "libopenvino_intel_cpu_plugin", "libopenvino.so")
FLAGS = re.compile(r"\b(avx512\w*|avx_(vnni|ifma|ne)\w*|amx_\w+|avx10\w*)\b")
# (leaf, subleaf) -> register -> bits to remove (Intel's manual, volume 2, CPUID).
HIDDEN = {
    (7, 0): {"rbx": (16, 17, 21, 26, 27, 28, 30, 31), "rcx": (1, 6, 11, 12, 14), "rdx": (2, 3, 8, 22, 23, 24, 25)},
    (7, 1): {"rax": (4, 5, 21, 23), "rdx": (4, 5, 8, 10, 19)},
}
AVAILABLE = platform.machine() == "x86_64" and shutil.which("gdb") is not None


def run(arguments: Sequence[str], **options: Any) -> int:
    """The exit code of `python ARGUMENTS`. options: of `subprocess.run`."""
    silent = ("set auto-load no", "set logging file /dev/null", "set logging redirect on", "set logging enabled on")
    quick = ("set auto-solib-add off",)  # symbols of libraries are unused; those of torch take 10 s to read
    settings = [word for line in (*silent, *quick) for word in ("-iex", line)]
    command = ["gdb", "-q", "-batch", *settings, "-x", __file__, "-ex", "quit $_exitcode", "--args"]
    return subprocess.run([*command, sys.executable, __file__, "inside", *arguments], **options, check=False).returncode


def trace() -> None:
    """Inside gdb: run the program, and change what each `cpuid` of `LIBRARIES` reports."""
    gdb.execute("set $_exitcode = 1")  # unless the program ends
    for name in LIBRARIES:
        gdb.execute(f"catch load {name}")
    known = set[range]()
    stop = gdb.execute("run", to_string=True)
    while gdb.selected_inferior().pid:
        for code in set(mapped()) - known:
            known.add(code)
            for address in instructions(code):
                gdb.execute(f"break *{address:#x}", to_string=True)
        frame = gdb.selected_frame()
        if frame.architecture().disassemble(frame.pc())[0]["asm"].strip() == "cpuid":
            leaf, subleaf = (int(frame.read_register(name)) & 0xFFFFFFFF for name in ("rax", "rcx"))
            gdb.execute("stepi", to_string=True)
            for register, bits in HIDDEN.get((leaf, subleaf), {}).items():
                value = int(gdb.selected_frame().read_register(register)) & 0xFFFFFFFF
                gdb.execute(f"set ${register} = {value & ~sum(1 << bit for bit in bits)}")
        elif "received signal" in stop:
            break
        stop = gdb.execute("continue", to_string=True)


def mapped() -> Iterator[range]:
    """The addresses of the code of `LIBRARIES`."""
    for line in Path(f"/proc/{gdb.selected_inferior().pid}/maps").read_text().splitlines():
        addresses, rights, *_, path = line.split(maxsplit=5)
        if "x" in rights and any(name in Path(path).name for name in LIBRARIES):
            yield range(*(int(address, 16) for address in addresses.split("-")))


def instructions(code: range) -> Iterator[int]:
    """The addresses of `cpuid`: of its two bytes, if decoding from three places before them reaches their first byte.

    Instructions have up to 15 bytes. Decoding that starts inside one soon reaches the start of another.
    """
    process, at = gdb.selected_inferior(), code.start
    decode = process.architecture().disassemble
    while at := process.search_memory(at, code.stop - at, CPUID):
        starts = [max(code.start, at - before) for before in (200, 150, 100)]
        if all(decode(start, at)[-1]["addr"] == at for start in starts):
            yield at
        at += 1


def inside(arguments: Sequence[str]) -> None:
    """In the traced process: run what `python ARGUMENTS` runs, with a /proc/cpuinfo without the hidden flags."""
    sys.path[0] = ""
    from vitcompress.io import hardware

    with tempfile.TemporaryDirectory() as folder:
        flags = Path(folder, "cpuinfo")
        flags.write_text(FLAGS.sub("", Path("/proc/cpuinfo").read_text()))
        hardware.CPUINFO = flags
        sys.argv = list(arguments[1:] if arguments[0] == "-m" else arguments)
        if arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")


if gdb is not None:
    trace()
elif __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(sys.argv[2:])
    else:
        sys.exit(run(sys.argv[1:]))
