"""Keys, signatures, and `--require-signed`: every change is rejected, and nothing is read before the signature."""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from command_line import begin, copy_run, expect_error, tree
from contracts import WEIGHTS_IN_ONE_FILE, build, traces
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from vitcompress import cli
from vitcompress.errors import ArtifactError
from vitcompress.exporters.onnx import export as onnx_export
from vitcompress.exporters.runtimes import EXPORTERS, open_runner
from vitcompress.exporters.sidecar import amend_sidecar, sidecar_path
from vitcompress.exporters.tensorrt import runner
from vitcompress.io.files import file_sha256, signed_files
from vitcompress.io.signature import check_signature, generate_key, read_private_key, read_public_keys
from vitcompress.models.create import input_config
from vitcompress.pipeline.export_folder import sign_artifact

ONNX, DATA, IR, ENGINE, RUN = "run/model.onnx", "data.onnx", "run/model.xml", "run/model.rtx.engine", "run"
HAS_ENGINE = EXPORTERS["trt-rtx"].unavailable() is None
ARTIFACTS = [ONNX, DATA, IR, *([ENGINE] if HAS_ENGINE else []), RUN]


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.main, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture(scope="module")
def finished(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a run and its files, all signed with the key `key`, and another key."""
    with pytest.MonkeyPatch.context() as patch:
        begin(tmp_path_factory.mktemp("signed") / "home", patch)
        copy_run(small_run)
        for key in ("key", "other"):
            call("keygen", key)
        call("export", RUN, "--format", "openvino", "--sign", "key")
        if HAS_ENGINE:
            call("export", RUN, "--format", "trt-rtx", "--sm", "89", "--batch", "1:2:4", "--sign", "key")
        model = build("plain", dtype=torch.float32)
        patch.setattr(WEIGHTS_IN_ONE_FILE, 0)
        onnx_export.export(model, DATA, input=input_config(model), traces=traces("plain"))
        for artifact in (ONNX, DATA, RUN):
            call("sign", artifact, "--key", "key")
        return Path.cwd()


@pytest.fixture(autouse=True)
def home(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of it as working folder; `key` is trusted."""
    shutil.copytree(finished, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("VITCOMPRESS_TRUSTED_KEYS", str(tmp_path / "home" / "key.pub"))


@contextmanager
def allowed(hashes: dict[Path, str]) -> Iterator[None]:
    token = signed_files.set({file.resolve(): sha256 for file, sha256 in hashes.items()})
    try:
        yield
    finally:
        signed_files.reset(token)


def keys(*names: str) -> list:
    return read_public_keys(Path(f"{name}.pub") for name in names or ("key",))


def signature(artifact: str) -> Path:
    return Path("run/manifest.json.dsse" if artifact == RUN else f"{artifact}.dsse")


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_a_signature_is_valid_until_something_changes(artifact: str) -> None:
    hashes = check_signature(Path(artifact), keys("other", "key"))
    assert all(file_sha256(file) == sha256 for file, sha256 in hashes.items())
    names = {file.name for file in hashes}
    expected = {
        ONNX: {"model.onnx", "model.onnx.json"},
        DATA: {"data.onnx", "data.onnx.data", "data.onnx.json"},
        IR: {"model.xml", "model.bin", "model.xml.json"},
        ENGINE: {"model.rtx.engine", "model.rtx.engine.json"},
    }
    assert names == expected.get(artifact, names) and len(names) > 1
    if artifact == RUN:
        assert {"model.safetensors", "plan.json", "report.json", "model.onnx", "model.bin", "recipe.toml"} <= names


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_the_envelope_is_dsse_with_an_in_toto_statement(artifact: str) -> None:
    envelope = json.loads(signature(artifact).read_text())
    payload = base64.b64decode(envelope["payload"], validate=True)
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    (one,) = envelope["signatures"]
    signed = b"DSSEv1 28 application/vnd.in-toto+json " + str(len(payload)).encode() + b" " + payload
    keys()[0].verify(base64.b64decode(one["sig"]), signed)
    assert one["keyid"] == Path("key.pub").read_text().strip()
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert all(len(sha256) == 64 for sha256 in subjects.values()) and ("plan" in subjects) is (artifact != DATA)
    if artifact != DATA:  # which is of no run
        assert subjects["plan"] == json.loads(Path("run/report.json").read_text())["plan_sha256"]
        assert statement["predicate"]["verification"]["passed"] > 0
    if artifact == ENGINE:
        assert subjects["model.rtx.engine.onnx"] == file_sha256(Path("run/model.rtx.engine.onnx"))
        assert statement["predicate"]["build"]["sm"] == [89]


def flip(path: Path, place: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def change_statement(artifact: str) -> None:
    """To another valid statement, with the old signature."""
    envelope = json.loads(signature(artifact).read_text())
    payload = base64.b64decode(envelope["payload"]).replace(b'"verification"', b'"verifications"')
    signature(artifact).write_text(json.dumps({**envelope, "payload": base64.b64encode(payload).decode()}))


def change_signature(artifact: str) -> None:
    envelope = json.loads(signature(artifact).read_text())
    raw = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    raw[5] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(raw).decode()
    signature(artifact).write_text(json.dumps(envelope))


def sign_as_other(artifact: str) -> None:
    sign_artifact(Path(artifact), read_private_key(Path("other")))


def sign_another_statement(artifact: str) -> None:
    """What the trusted key signed with another tool."""
    payload = b'{"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://slsa.dev/provenance/v1"}'
    message = b"DSSEv1 28 application/vnd.in-toto+json " + str(len(payload)).encode() + b" " + payload
    entry = {"sig": base64.b64encode(read_private_key(Path("key")).sign(message)).decode()}
    envelope = {"payloadType": "application/vnd.in-toto+json", "payload": base64.b64encode(payload).decode()}
    signature(artifact).write_text(json.dumps({**envelope, "signatures": [entry]}))


SIGNATURE_CHANGES: dict[str, tuple[Callable[[str], object], str]] = {
    "statement": (change_statement, "not signed by a trusted key, or was changed"),
    "signature": (change_signature, "not signed by a trusted key, or was changed"),
    "untrusted key": (sign_as_other, "not signed by a trusted key, or was changed"),
    "of another file": (
        lambda a: shutil.copy(signature(IR if a != IR else ONNX), signature(a)),
        "is the signature of another file",
    ),
    "of another tool": (sign_another_statement, "is not one of vitcompress: it has another type"),
    "missing": (lambda a: signature(a).unlink(), "has no signature"),
    "not JSON": (lambda a: signature(a).write_bytes(b"\xff"), "cannot be read as JSON"),
    "no envelope": (lambda a: signature(a).write_text('{"payload": 1}'), "is not one of vitcompress"),
}


@pytest.mark.parametrize("change", SIGNATURE_CHANGES)
@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_other_signatures_are_rejected_before_anything_else_is_read(artifact: str, change: str) -> None:
    work, message = SIGNATURE_CHANGES[change]
    work(artifact)
    trusted, opened = keys(), list[str]()
    OPENED.append(opened)
    with pytest.raises(ArtifactError, match=message):
        check_signature(Path(artifact), trusted)
    OPENED.clear()
    assert [Path(path) for path in opened] == [signature(artifact)] * (change != "missing")


OPENED: list[list[str]] = []
sys.addaudithook(lambda event, args: [all.append(str(args[0])) for all in OPENED if event == "open"] and None)


def test_a_removed_or_added_file_is_rejected() -> None:
    for artifact, name in ((DATA, "data.onnx.data"), (IR, "run/model.bin"), (ONNX, "run/model.onnx.json")):
        Path(name).rename("moved")
        with pytest.raises(ArtifactError, match=f"{Path(name).name} is not as it was signed: sha256 is missing"):
            check_signature(Path(artifact), keys())
        Path("moved").rename(name)
    shutil.copy(DATA, "run/model-fp16.onnx")
    with pytest.raises(ArtifactError, match=r"model-fp16\.onnx is in a signed folder, but not signed"):
        check_signature(Path(RUN), keys())


CHANGED_FILES = [
    *((ONNX, name) for name in ("run/model.onnx", "run/model.onnx.json")),
    *((DATA, name) for name in (DATA, f"{DATA}.data", f"{DATA}.json")),
    *((IR, name) for name in ("run/model.xml", "run/model.bin", "run/model.xml.json")),
    *((ENGINE, name) for name in ("run/model.rtx.engine", "run/model.rtx.engine.json") if HAS_ENGINE),
    *(
        (RUN, f"run/{name}")
        for name in ("manifest.json", "model.safetensors", "report.json", "model.onnx", "verify.json")
    ),
]


@pytest.mark.parametrize(("artifact", "name"), CHANGED_FILES)
@pytest.mark.parametrize("place", [0, -1])
def test_a_changed_file_is_rejected(artifact: str, name: str, place: int) -> None:
    flip(Path(name), place)
    with pytest.raises(ArtifactError, match=f"{name} is not as it was signed"):
        check_signature(Path(artifact), keys())


def test_an_engine_that_is_swapped_after_the_check_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its sidecar is swapped with it: the process of the engine compares the bytes that it opens."""
    if not HAS_ENGINE:
        pytest.skip("no such library for this platform")
    path = Path(ENGINE)
    hashes = check_signature(path, keys())
    flip(path)
    amend_sidecar(path, files={path.name: file_sha256(path)}, sha256=file_sha256(path))
    shutil.rmtree("run/state")
    Path("run/manifest.json").unlink()
    monkeypatch.setattr(runner, "_choose_gpu", lambda *arguments: 0)
    with allowed(hashes), pytest.raises(ArtifactError, match="the file has changed"):
        open_runner(path)


# ------------------------------------------------------------------------------------------------------------ commands


def test_signed_folders_and_files_can_be_used_again_and_again() -> None:
    before = tree(Path(RUN))
    quick = ("--protocol", "paper", "--batch", "2", "--runs", "3", "--warmup", "1")
    for _ in range(2):
        for command in (("bench", ONNX, IR, RUN, *quick), ("evaluate", ONNX, RUN), ("verify", RUN), ("report", RUN)):
            call(*command, "--require-signed")
    assert tree(Path(RUN)) == before, "the signature is still valid"
    call("verify", RUN)
    bare = ("--set", "export.formats=[]", "--set", 'bench.runtimes=["torch"]')
    call("recipe", "small.toml", "--structure-only", "--fresh", "--out", RUN, *bare)
    assert not list(Path().glob("run/*.dsse"))


@pytest.mark.parametrize("command", ["bench", "evaluate", "verify", "report"])
def test_commands_reject_what_is_not_signed(command: str) -> None:
    flip(Path("run/model.safetensors"))
    assert "model.safetensors is not as it was signed" in expect_error(command, RUN, "--require-signed")
    if command in ("bench", "evaluate"):
        assert "is not as it was signed" in expect_error(command, ONNX, RUN, "--require-signed")
        assert "has no signature" in expect_error(command, ONNX, "run/dense.onnx", "--require-signed")


def test_nothing_else_is_opened_where_signatures_are_required() -> None:
    with allowed(check_signature(Path(IR), keys())):
        with closing(open_runner(IR)):
            pass
        for other in (ONNX, RUN):
            with pytest.raises(ArtifactError, match="is not signed"):
                open_runner(other)


def test_timm_models_have_no_signature() -> None:
    assert "has no signature" in expect_error("bench", "timm:vit_tiny_patch16_224", "--require-signed")


def test_files_that_cannot_be_signed() -> None:
    sidecar_path(Path(ONNX)).unlink()
    assert "cannot be signed: there is no run/model.onnx.json" in expect_error("sign", ONNX, "--key", "key")
    assert "is not as it was written" in expect_error("sign", RUN, "--key", "key")
    Path("run/manifest.json").unlink()
    assert "--adopt" in expect_error("sign", RUN, "--key", "key")
    flip(Path(DATA))
    assert "does not match it" in expect_error("sign", DATA, "--key", "key")
    assert "does not exist" in expect_error("sign", "nothing.onnx", "--key", "key")


# ---------------------------------------------------------------------------------------------------------------- keys


def rsa(path: str) -> None:
    key = generate_private_key(65537, 2048)
    Path(path).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    Path(f"{path}.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def test_keys_that_cannot_sign(tmp_path: Path) -> None:
    rsa("rsa")
    Path("text").write_text("secret")
    pkcs8 = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    Path("pkcs8").write_bytes(pkcs8)
    problems = {"rsa": "another type", "text": "", "pkcs8": "", "key.pub": "", "missing": "No such file", "run": ""}
    for name, problem in problems.items():
        for command in (("sign", ONNX, "--key"), ("export", RUN, "--out", "new.onnx", "--sign")):
            if name == "run":  # a folder
                assert "is a directory" in expect_error(*command, name)
            else:
                assert f"{name} has no private ed25519 key: " in (text := expect_error(*command, name))
                assert problem in text and "vitcompress keygen" in text


def test_the_home_folder_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves `~` in `--out=~/x` and in environment variables: a folder of this name was created."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    call("keygen", "~/key")
    assert (tmp_path / "user" / "key.pub").is_file() and not (tmp_path / "~").exists()


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_keys_of_ssh_keygen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, phrase in (("ssh", ""), ("locked", "secret")):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-C", "me@here", "-N", phrase, "-f", name], check=True)
    assert "Key is password-protected" in expect_error("sign", ONNX, "--key", "locked")
    call("sign", ONNX, "--key", "ssh")
    assert "not signed by a trusted key" in expect_error("evaluate", ONNX, "--require-signed")
    Path("allowed").write_text("# people\n\n" + Path("locked.pub").read_text() + Path("ssh.pub").read_text())
    monkeypatch.setenv("VITCOMPRESS_TRUSTED_KEYS", "allowed")
    call("evaluate", ONNX, "--require-signed")
    derived = subprocess.run(["ssh-keygen", "-y", "-f", "key"], capture_output=True, text=True, check=True)
    assert derived.stdout.split()[:2] == Path("key.pub").read_text().split()


def test_trusted_keys_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rsa("rsa")
    Path("text.pub").write_bytes(b"\xff secret")
    for name in ("rsa.pub", "text.pub"):
        monkeypatch.setenv("VITCOMPRESS_TRUSTED_KEYS", f"key.pub:{name}")
        text = expect_error("evaluate", ONNX, "--require-signed")
        assert f"{name} has no public ed25519 key: " in text
    monkeypatch.setenv("VITCOMPRESS_TRUSTED_KEYS", "missing.pub")
    assert "no key is trusted: there is none in missing.pub" in expect_error("evaluate", ONNX, "--require-signed")
    monkeypatch.delenv("VITCOMPRESS_TRUSTED_KEYS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no key is trusted" in expect_error("evaluate", ONNX, "--require-signed"), "not those beside the file"
    if sys.platform == "linux":
        place = tmp_path / "config" / "vitcompress" / "trusted_keys"
        place.mkdir(parents=True)
        shutil.copy("key.pub", place / "ours.pub")
        call("evaluate", ONNX, "--require-signed")


def test_keygen_writes_a_private_file_and_replaces_nothing() -> None:
    assert Path("key").stat().st_mode & 0o777 == 0o600 or sys.platform == "win32"
    assert "exists" in expect_error("keygen", "key")
    Path("key.pub").unlink()
    assert "key exists" in expect_error("keygen", "key")
    assert generate_key(Path("new/key")) == Path("new/key.pub").read_text().strip()
