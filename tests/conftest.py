"""One thread for all tests: the models are so small that a second one only waits, the longer the busier the machine.

And a garbage collector that does not go through all that the libraries hold every few hundred new objects: it took a
tenth of the time of the tests that export.
"""

import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script that starts the tests in the background (`pytest &`) has them ignore SIGINT, and with them every process that
# they start and interrupt: the tests of Ctrl-C would wait without end.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take more than 20 s of processor time, the longest ones first.
LONGEST = ("test_fuzz", "test_onnx_export", "test_interrupted_runs", "test_option_effects", "test_train_quantized")
LONGEST += ("test_agreement_matrix", "test_simulated_gpu", "test_study", "test_openvino_int8", "test_compositions")
LONGEST += ("test_fp32_layers", "test_recipe_exports", "test_current_report", "test_speed", "test_avx2")
LONGEST += ("test_manifest", "test_simulated_runtimes", "test_api", "test_smooth", "test_suite", "test_engine_folders")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: a worker takes whole files, and one left for the end keeps the others waiting."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Set aside what the imports have made, half a million objects that stay, and look at new ones less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session", autouse=True)
def _shared_operators() -> Iterator[None]:
    """Read the tables of ONNX functions and of torch's operators, which no export changes, once.

    They take a quarter and a tenth of the time of an export of a tiny model.
    """
    import torch.export.exported_program
    from torch._export import utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        name = "_collect_all_valid_cia_ops"
        operators = cache(getattr(utils, name))
        for module in (utils, torch.export.exported_program, torch.export.decomp_utils):
            if hasattr(module, name):
                patch.setattr(module, name, operators)
        yield


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries that count what is left at the end of the process would complain


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of `command_line.RECIPE` without training, for tests that work on a copy."""
    from command_line import begin, finish_run

    with pytest.MonkeyPatch.context() as patch:
        begin(tmp_path_factory.mktemp("small") / "home", patch)
        return finish_run().resolve()
