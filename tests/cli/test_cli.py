"""The command line: exit codes, one panel per error, only JSON on standard output, and help without torch."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner, Result
from packages import write_package

from vitcompress import cli, recipes
from vitcompress.cli import common, options
from vitcompress.exporters.options import Precision
from vitcompress.io.log_file import log_warnings
from vitcompress.methods.options import OPTIONS

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "timm", "numpy", "onnx", "onnxruntime", "pydantic", "PIL", "rich")


def commands(group: click.Group = cli.main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = list(commands())


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def loaded_by(*arguments: str, **environment: str) -> set[str]:
    """Which heavy packages the program imports when it is called like this."""
    code = (
        "import sys, atexit; atexit.register(lambda: print('\\n', *sys.modules, file=sys.stderr));"
        "from vitcompress.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return set(HEAVY) & set(done.stderr.split())


@pytest.mark.parametrize("path", [(), *ALL], ids=" ".join)
def test_help_imports_no_heavy_package(path: tuple[str, ...]) -> None:
    assert loaded_by(*path, "--help") == set()


def test_the_import_check_sees_an_import() -> None:
    assert "torch" in loaded_by("bench", "timm:nowhere")


def test_completion_and_listing_import_no_torch() -> None:
    completion = {
        "_VITCOMPRESS_COMPLETE": "bash_complete",
        "COMP_WORDS": "vitcompress recipe digits_",
        "COMP_CWORD": "2",
    }
    assert loaded_by(**completion) == set()
    assert loaded_by("--version") == set()
    assert loaded_by("recipes", "show", "digits_hetdpt") == loaded_by("recipes", "show", "digits") == {"rich"}
    assert "torch" not in loaded_by("study", "digits", "--rows", "nowhere") | loaded_by("recipe", "nowhere.toml")
    assert loaded_by("recipes") == loaded_by("recipes", "keys", "hetdpt") == {"rich", "pydantic"}


def completions(words: str, **environment: str) -> list[str]:
    """What bash offers for the last of the `words`."""
    place = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), **environment}
    code = "from vitcompress.cli import main; main()"
    environment = {**os.environ, "_VITCOMPRESS_COMPLETE": "bash_complete", **place}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    return [line.removeprefix("plain,") for line in done.stdout.split()]


def test_completion_knows_names_of_recipes_methods_and_precisions() -> None:
    offered = completions("vitcompress recipe digits_he")
    assert "digits_hetdpt" in offered and all(name.startswith("digits_he") for name in offered)
    assert {*recipes.names(), *OPTIONS} == {*completions("vitcompress recipes keys ")}
    assert completions("vitcompress recipes keys up") == [*completions("vitcompress recipe up"), "upvit"]
    assert completions("vitcompress export run --precision ") == [*get_args(Precision), "fastest"]
    assert completions("vitcompress bench run --precision b") == ["bf16"]
    assert completions("vitcompress sign run --key k") == completions("vitcompress export run --sign k") == ["file,k"]


def test_completion_knows_methods_of_other_packages(tmp_path: Path) -> None:
    site = write_package(tmp_path / "site", "methods", "pruner_taylor = pruner:METHOD")
    assert completions("vitcompress recipes keys pru", PYTHONPATH=str(site)) == ["pruner_taylor"]


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_has_a_help_text_and_takes_json_and_debug(path: tuple[str, ...]) -> None:
    result = invoke(*path, "--help")
    assert result.exit_code == 0 and "--json" in result.output and "--debug" in result.output
    assert len(result.output.split("\n")[2].strip()) > 10, "no description"


def test_help_lists_the_commands_in_the_order_of_use() -> None:
    shown = re.findall(r"^  (\w+) ", invoke("--help").stdout.partition("Commands:")[2], re.MULTILINE)
    assert shown == list(cli.main.commands) and shown[0] == "recipe" and shown[-1] == "doctor"


def test_without_a_command_help_is_printed() -> None:
    assert "Usage" in invoke().stdout and invoke().exit_code == 0
    assert invoke("--help").stdout == invoke().stdout


def test_published_and_counted_sizes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "names", lambda: ("deit_b_hetdpt", "deit_t_sero", "digits_sero"))
    (deit, sero) = json.loads(invoke("recipes", "--count", "--json").stdout)
    assert deit["params_m"]["published"] == 54.9 and abs(deit["params_m"]["counted"] - 54.867152) < 1e-6 and deit["met"]
    assert not sero["met"] and sero["reason"]
    shown = invoke("recipes", "--count").stdout
    assert (
        "54.9 M" in shown and "54.867 M" in shown and "10.5 G*" in shown and f"deit_t_sero: {sero['reason']}" in shown
    )


def test_recipes_are_listed_and_shown() -> None:
    assert json.loads(invoke("recipes", "--json").stdout) == recipes.summaries()
    listed = invoke("recipes")
    assert all(name in listed.stdout for name in recipes.names()) and listed.stderr == ""
    assert listed.stdout.index("up_pvtv2_b1") < listed.stdout.index("digits_random"), "baselines are last"
    assert invoke("recipes", "show", "digits_nose").stdout == recipes.text("digits_nose")
    assert invoke("recipes", "show", "digits").stdout == recipes.study_text("digits")
    shown = json.loads(invoke("recipes", "show", "digits_nose", "--json").stdout)
    assert shown == {"name": "digits_nose", "toml": recipes.text("digits_nose")}


def test_the_schema_of_recipes_knows_all_methods() -> None:
    text = invoke("recipes", "schema").stdout
    assert '"minimum"' in text and '"ge"' not in text, "limits have the names of JSON Schema"
    schema = json.loads(text)
    methods = {step["properties"]["method"]["const"] for step in schema["properties"]["step"]["items"]["oneOf"]}
    assert schema["required"] and methods >= {"hetdpt", "nose", "isomorphic", "sero", "upvit"}


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("recip",), "recipe"),
    (("--nope",), "--nope"),
    (("recipe",), "Missing argument"),
    (("recipe", "digits_hetdtp"), "digits_hetdpt"),
    (("recipe", "digits_hetdpt", "--set", "finetune.epochs=-1"), "expected 0 or more"),
    (("recipe", "digits_hetdpt", "--epochs", "3"), "--set finetune.epochs=10"),
    (("recipe", "digits_hetdpt", "--export", "onxx"), "onxx"),
    (("recipes", "show", "digits_nos"), "digits_nose"),
    (("recipes", "show", __file__), "is a file, not the name of a recipe of this package"),
    (("recipe", "digits_hetdpt", "--set", "pruned_layers=3"), "published, step"),
    (("recipe", "digits_hetdpt", "--set", "steps.pruned_layers=3"), "did you mean step?"),
    (("bench", "model.onnx", "--batch", "0"), "--batch"),
    (("bench", "nowhere.onnx"), "nowhere.onnx"),
    (("evaluate", "nowhere.onnx", "--data", "digits"), "nowhere.onnx"),
    (("evaluate", "nowhere.onnx"), "nowhere.onnx"),
    (("export", "nowhere"), "nowhere"),
    (("verify", "nowhere"), "nowhere"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_wrong_input_is_one_panel_and_exit_2(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.count("╭") == 1 and "Traceback" not in result.stderr
    assert sentence in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_wrong_input_with_json_prints_only_json(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 2 and set(data) >= {"error", "hint", "kind"}
    assert sentence in f"{data['error']} {data['hint']}" and "╭" not in result.stderr


def add_command(monkeypatch: pytest.MonkeyPatch, behavior: Any) -> None:
    """Add a command that calls `behavior`, for one test."""
    command = click.Command("act", callback=common.common_options(lambda: behavior()))
    command.params = getattr(command.callback, "__click_params__", [])
    monkeypatch.setitem(cli.main.commands, "act", command)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (options.parse_words, "onnx, trt", ("onnx", "trt")),
        (options.parse_capabilities, "80,8.9,sm_120", (80, 89, 120)),
        (options.parse_batch_range, "1:8:256", (1, 8, 256)),
        (options.parse_batch_range, "8", (8, 8, 8)),
        (options.parse_size, "512M", 512 * 2**20),
        (options.parse_size, "4GiB", 4 * 2**30),
    ],
)
def test_option_values_are_parsed(read: Any, text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (options.parse_capabilities, "ampere"),
        (options.parse_batch_range, "1:2"),
        (options.parse_batch_range, "0:1:2"),
        (options.parse_size, "lots"),
    ],
)
def test_a_wrong_option_value_is_shown(read: Any, text: str) -> None:
    with pytest.raises(click.BadParameter, match=text):
        read(text)


def test_an_unexpected_error_is_one_panel_and_a_traceback_only_with_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, lambda: {}["gone"])
    result = invoke("act")
    assert result.exit_code == 1 and result.stderr.count("╭") == 1 and "Traceback" not in result.stderr
    assert "KeyError" in result.stderr and "--debug" in result.stderr
    assert "Traceback" in invoke("act", "--debug").stderr


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("Allocator: can't allocate memory: 9 bytes\nframe 0")])
def test_too_little_memory_is_not_a_bug(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    add_command(monkeypatch, fail)
    result = invoke("act")
    assert result.exit_code == 1 and "not enough memory" in result.stderr and "smaller batch" in result.stderr
    assert "bug in vitcompress" not in result.stderr and "frame 0" not in result.stderr


def test_an_error_of_the_operating_system_is_not_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, lambda: Path("/nowhere/at/all").read_text())
    result = invoke("act")
    assert result.exit_code == 1 and "bug in vitcompress" not in result.stderr
    assert "system error (/nowhere/at/all): No such file or directory" in " ".join(result.stderr.split())


def test_a_missing_permission_is_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "run/bench.json")

    add_command(monkeypatch, fail)
    result = invoke("act")
    assert result.exit_code == 2 and "run/bench.json: Permission denied" in " ".join(result.stderr.split())


@contextmanager
def with_flag(name: str, value: bool) -> Iterator[None]:
    with click.Context(click.Command("act"), obj={name} if value else set()):
        yield


def test_logs_of_libraries_are_hidden_while_a_command_works(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("some.library")
    for debug, messages in ((False, []), (True, ["meanwhile"])):
        caplog.clear()
        with with_flag("debug", debug), common.show_progress():
            log.warning("meanwhile")
        assert caplog.messages == messages
        log.warning("later")
        assert caplog.messages == [*messages, "later"]


def test_only_one_process_of_a_host_prints_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    result = invoke("recipe", "digits_hetdtp")
    assert result.exit_code == 2 and result.stderr == ""


def test_only_the_first_process_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert invoke("recipes", "--json").stdout == ""


def test_names_of_formats_precisions_and_devices_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment, too."""
    precision = lambda *words: export.make_context("export", ["tests", *words]).params["precision"]  # noqa: E731
    export = cli.main.commands["export"]
    assert [precision("--precision", word) for word in ("FP16", "fp16", "Fastest")] == ["fp16", "fp16", "fastest"]
    formats = [
        export.make_context("export", ["tests", "--format", word]).params["format"] for word in ("OpenVINO", "trt")
    ]
    assert formats == ["openvino", "trt"]
    recipe = cli.main.commands["recipe"].make_context("recipe", ["x", "--export", "TRT,OpenVINO", "-o", "out", "-q"])
    assert recipe.params["export"] == ("trt", "openvino") and recipe.params["out"] == Path("out")
    monkeypatch.setenv("VITCOMPRESS_RECIPE_DEVICE", "CUDA:nine")
    assert "cuda:nine" in invoke("recipe", "digits_hetdpt", "--dry-run").output


@pytest.mark.parametrize(
    ("command", "option", "parts", "value"),
    [
        ("export", "sm", ("89,9.0", "120"), (89, 90, 120)),
        ("export", "islands", ("norm", "head, ffn"), ("norm", "head", "ffn")),
        ("bench", "batch", ("1,8", "64"), (1, 8, 64)),
        ("recipe", "export", ("onnx", "OpenVINO"), ("onnx", "openvino")),
        ("study", "rows", ("a", "b"), ("a", "b")),
    ],
)
def test_a_list_may_have_several_parts(
    command: str, option: str, parts: tuple[str, str], value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last part had an effect."""

    def read(*words: str) -> object:
        prefix = f"VITCOMPRESS_{command.upper()}"
        return cli.main.commands[command].make_context(command, ["x", *words], auto_envvar_prefix=prefix).params[option]

    assert read() is None
    assert read(*(word for part in parts for word in (f"--{option}", part))) == value
    assert read(f"--{option}", ",".join(parts)) == value
    monkeypatch.setenv(f"VITCOMPRESS_{command.upper()}_{option.upper()}", " ".join(parts))
    assert read() == value


def test_every_option_has_an_environment_variable_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITCOMPRESS_RECIPE_SET", "finetune.epochs=-7 run.seed=3")
    recipe = cli.main.commands["recipe"].make_context("recipe", ["x"], auto_envvar_prefix="VITCOMPRESS_RECIPE")
    assert recipe.params["set"] == ("finetune.epochs=-7", "run.seed=3")
    assert "-7" in invoke("recipe", "digits_hetdpt").output
    monkeypatch.setenv("VITCOMPRESS_RECIPES_JSON", "1")
    assert "digits_hetdpt" in json.loads(invoke("recipes").stdout)
    monkeypatch.setenv("VITCOMPRESS_REPORT_JSON", "1")
    for words in (("report", "nowhere"), ("report", ".", "--max-drop", "-1")):
        assert json.loads(invoke(*words).stdout)["kind"] == "InputError"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("evaluate", "timm:vit_tiny_patch16_224"), "BATCH", "abc"),
        (("bench", "timm:vit_tiny_patch16_224"), "BATCH", "0"),
        (("recipe", "digits_hetdpt"), "MAX_DROP", "500"),
        (("recipe", "digits_hetdpt"), "FRESH", "perhaps"),
        (("study", "digits"), "SPEED", "never"),
    ],
)
def test_a_wrong_value_of_the_environment_names_its_variable(
    words: tuple[str, ...], name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = f"--{name.lower().replace('_', '-')}"
    if option != "--fresh":  # which has no value
        assert f"Invalid value for '{option}': " in json.loads(invoke(*words, option, value, "--json").stdout)["error"]
    monkeypatch.setenv(f"VITCOMPRESS_{words[0].upper()}_{name}", value)
    message = json.loads(invoke(*words, "--json").stdout)["error"]
    assert f"Invalid value for '{option}' (from VITCOMPRESS_{words[0].upper()}_{name}): " in message


def test_quiet_and_verbose(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        with common.show_progress() as progress:
            warnings.warn("from a library", stacklevel=1)
            progress.note("ours")

    add_command(monkeypatch, work)
    with warnings.catch_warnings(record=True) as shown:
        assert "ours" in invoke("act").stderr and invoke("act", "-q").stderr == "" and not shown
        assert "ours" in invoke("act", "-v").stderr and len(shown) == 1


def test_a_run_logs_the_warnings_of_libraries(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of `warnings`, and of loggers with and without handlers of their own; everything is restored."""
    own, plain = logging.getLogger("some.own"), logging.getLogger("some.plain")
    own.propagate, handler = False, logging.StreamHandler()
    own.addHandler(handler)
    before = (warnings.showwarning, logging.root.manager.disable, list(logging.root.handlers))
    for debug in (False, True):
        path = tmp_path / f"{debug}.log"
        with with_flag("debug", debug), common.show_progress(), log_warnings(path):
            assert not path.exists()
            warnings.warn(f"by warnings {debug}", stacklevel=1)
            plain.warning("by a logger")
            own.warning("by its own handler")
            own.error("an error")
        logged = path.read_text()
        assert all(text in logged for text in (f"by warnings {debug}", "by a logger", "by its own handler", "an error"))
        shown = capfd.readouterr().err
        assert "an error" in shown and ("by its own handler" in shown) == debug
        assert before == (warnings.showwarning, logging.root.manager.disable, logging.root.handlers)
    assert not handler.filters and own.handlers == [handler]


def test_runs_of_two_threads_may_end_in_the_order_of_their_beginnings(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        logging.disable(logging.INFO)
        try:
            first, second = (log_warnings(tmp_path / name) for name in ("first.log", "second.log"))
            for block in (first, second):
                block.__enter__()
            warnings.warn("during both", stacklevel=1)
            for block in (first, second):
                block.__exit__(None, None, None)
            warnings.warn("after both", stacklevel=1)
            assert logging.root.manager.disable == logging.INFO
        finally:
            logging.disable(logging.NOTSET)
        texts = [path.read_text() for path in sorted(tmp_path.iterdir())]
        assert len(texts) == 2 and all("during both" in text and "after both" not in text for text in texts)
        assert [str(one.message) for one in shown] == ["during both", "after both"]


def test_an_own_warning_reaches_the_terminal_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With and without a run folder, which keeps it too."""
    path = tmp_path / "warnings.log"
    for kept in (nullcontext(), log_warnings(path)):
        with common.show_progress(), kept:
            logging.getLogger("vitcompress").error("two builds")
        assert capfd.readouterr().err.count("warning: two builds\n") == 1
    assert path.read_text().count("two builds") == 1 and not logging.getLogger("vitcompress").handlers


def test_output_of_libraries_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with common.show_progress() as progress:
        print("library chatter")  # noqa: T201
        progress.note("ours")
    out, err = capsys.readouterr()
    assert out == "" and "library chatter" in err and "ours" in err


def stopped(tmp_path: Path, *arguments: str, when: str) -> subprocess.CompletedProcess[str]:
    """Run the program and press Ctrl-C as soon as it prints `when`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vitcompress", *arguments],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    text = ""
    while when not in text:
        line = process.stderr.readline()
        assert line, f"ended before it printed {when!r}: {text}"
        text += line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, text + err)


def press_in_finalizer() -> None:
    class Graph:
        """Freed while Ctrl-C is pressed."""

        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    Graph()


def press_and_ignore() -> None:
    with suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("press", [press_in_finalizer, press_and_ignore])
def test_a_lost_ctrl_c_is_repeated(press: Callable[[], None]) -> None:
    passed, handlers = False, [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)]
    with pytest.raises(click.Abort), common.abort_on_interrupts():
        press()
        for _ in range(1000):
            time.sleep(0.01)
        passed = True
    assert not passed
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)] == handlers
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_lost_ctrl_c_ends_a_command_that_has_finished_or_failed() -> None:
    with pytest.raises(click.Abort), common.abort_on_interrupts():
        press_and_ignore()
    with pytest.raises(click.Abort), common.abort_on_interrupts():
        press_and_ignore()
        raise ValueError("of a library that was interrupted")


def test_ctrl_c_does_not_disturb_code_that_cleans_up() -> None:
    steps = []
    with pytest.raises(click.Abort), common.abort_on_interrupts():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            for step in range(5):
                time.sleep(0.05)
                with suppress(ValueError):
                    steps.append(step)
                    raise ValueError("handled while the interrupt is")
    assert steps == [0, 1, 2, 3, 4]


def test_commands_leave_ignored_ctrl_c_and_other_threads_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with common.abort_on_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

    def command() -> Any:
        with common.abort_on_interrupts():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor() as pool:
        assert pool.submit(command).result() is before


def test_ctrl_c_is_one_line_and_exit_130(tmp_path: Path) -> None:
    done = stopped(tmp_path, "recipe", "digits_random", when="Train the dense model")
    assert done.returncode == 130 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "stopped; the same command continues"
