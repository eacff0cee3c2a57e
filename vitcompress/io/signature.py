"""Signatures beside exported files and in run folders: in-toto statements (v1) in DSSE envelopes, signed with ed25519.

Formats: https://github.com/in-toto/attestation, https://github.com/secure-systems-lab/dsse, and keys of OpenSSH.
Importing this module raises MissingExtraError without `cryptography`.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError, InputError, MissingExtraError, OutputError, first_line
from vitcompress.io.files import convert_write_errors, file_sha256, read_json, write_json, write_text
from vitcompress.io.run_folder import SIGNATURE, RunFolder

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as ssh
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ModuleNotFoundError:
    raise MissingExtraError("cryptography", "sign", need="a signature") from None

Hashes = Mapping[str, str]  # name of a file -> SHA-256
PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = {"_type": "https://in-toto.io/Statement/v1", "predicateType": "urn:vitcompress:artifact:1"}
REMEDY = "copy the files and their signature again; `vitcompress sign` signs files as they are"


def generate_key(path: Path) -> str:
    """Write a private key to `path` and its public key to `path`.pub, as ssh-keygen does. Returns the public key.

    Raises OutputError if one of the files exists or cannot be written.
    """
    key, public = Ed25519PrivateKey.generate(), path.with_name(f"{path.name}.pub")
    if existing := next(filter(Path.exists, (path, public)), None):
        raise OutputError(f"{existing} exists", hint="choose another name")
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)  # for its owner only, before it has content
        path.write_bytes(key.private_bytes(ssh.Encoding.PEM, ssh.PrivateFormat.OpenSSH, ssh.NoEncryption()))
    write_text(public, f"{_public_text(key)}\n")
    return _public_text(key)


def _public_text(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes(ssh.Encoding.OpenSSH, ssh.PublicFormat.OpenSSH).decode()


def read_private_key(path: Path) -> Any:
    """Raises InputError if `path` is not a private ed25519 key of OpenSSH without passphrase."""
    return _read_keys(path, Ed25519PrivateKey, lambda data: [ssh.load_ssh_private_key(data, None)])[0]


def read_public_keys(places: Iterable[Path]) -> list[Any]:
    """The keys in files with one per line, as authorized_keys, and in the `.pub` files of folders.

    Raises InputError if a file cannot be read or has other lines, or if there is no key at all.
    """

    def load(data: bytes) -> list[Any]:
        return [ssh.load_ssh_public_key(line) for line in data.splitlines() if line.strip()[:1] not in (b"", b"#")]

    places = list(places)
    paths = [path for place in places for path in ([place] if place.is_file() else sorted(place.glob("*.pub")))]
    if keys := [key for path in paths for key in _read_keys(path, Ed25519PublicKey, load)]:
        return keys
    message = f"no key is trusted: there is none in {', '.join(map(str, places))}"
    raise InputError(message, hint="copy the signer's KEY.pub there, or set VITCOMPRESS_TRUSTED_KEYS to its path")


def _read_keys(path: Path, kind: type, load: Callable[[bytes], list[Any]]) -> list[Any]:
    try:
        keys = load(path.read_bytes())
        if all(isinstance(key, kind) for key in keys):
            return keys
        problem = "it has another type"
    except (OSError, TypeError, ValueError, UnsupportedAlgorithm) as error:  # TypeError: it has a passphrase
        problem = str(getattr(error, "strerror", None) or first_line(error))
    hint = "use the files of `vitcompress keygen KEY`, or of ssh-keygen without passphrase"
    words = "private" if kind is Ed25519PrivateKey else "public"
    raise InputError(f"{path} has no {words} ed25519 key: {problem}", hint=hint)


def write_signature(path: Path, files: Hashes, sources: Hashes, facts: Mapping[str, Any], key: Any) -> Path:
    """Sign a file, or the manifest of a run folder, and return the path of the signature.

    files: name, relative to its folder -> SHA-256, of all that is read when `path` is opened. sources: the same, of
    what it was built from. facts: further entries of the predicate.
    """
    subject = [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in {**sources, **files}.items() if sha256]
    statement: dict[str, object] = {**STATEMENT, "subject": subject, "predicate": dict(facts, files=list(files))}
    payload, signature = json.dumps(statement).encode(), _signature_path(path)
    entry = {"keyid": _public_text(key), "sig": b64encode(key.sign(_message(payload))).decode()}
    write_json(signature, {"payloadType": PAYLOAD, "payload": b64encode(payload).decode(), "signatures": [entry]})
    return signature


def _signature_path(path: Path) -> Path:
    signed = RunFolder(path).manifest if path.is_dir() else path
    return signed.with_name(f"{signed.name}{SIGNATURE}")


def _message(payload: bytes) -> bytes:
    """What a key signs: the type and the payload with their lengths."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)


def check_signature(path: Path, keys: Iterable[Any]) -> dict[Path, str]:
    """SHA-256 of every file that is read when the file or run folder `path` is opened; all were compared.

    The signature is checked before anything else is read. Raises ArtifactError if it is missing, damaged, by none of
    the `keys` or of another file, and if a file was changed, removed or added.
    """
    signature, folder = _signature_path(path), RunFolder.of(path)
    if not signature.is_file():
        raise ArtifactError(f"{path} has no signature: there is no file {signature}", hint=REMEDY)
    envelope = read_json(signature)
    try:
        payload, entries = b64decode(envelope["payload"]), [b64decode(one["sig"]) for one in envelope["signatures"]]
        if not any(_is_valid(key, entry, payload) for key in keys for entry in entries):
            hint = "if you trust its signer, add the signer's KEY.pub to your trusted keys"
            raise ArtifactError(f"{signature} is not signed by a trusted key, or was changed", hint=hint)
        statement = json.loads(payload)
        if not STATEMENT.items() <= statement.items():
            raise ValueError(f"it has another type than {STATEMENT['predicateType']}")
        digests = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
        signed = {folder.path / name: digests[name] for name in statement["predicate"]["files"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{signature} is not one of vitcompress: {first_line(error)}", hint=REMEDY) from None
    if signature not in map(_signature_path, signed):
        raise ArtifactError(f"{signature} is the signature of another file", hint=REMEDY)
    for file, sha256 in signed.items():
        if (actual := file_sha256(file) if file.is_file() else "missing") != sha256:
            problem = f"{file} is not as it was signed: sha256 is {actual[:12]}, {signature.name} has {sha256[:12]}"
            raise ArtifactError(problem, hint=REMEDY)
    if path.is_dir() and (added := sorted({*folder.files()} - signed.keys())):
        raise ArtifactError(f"{added[0]} is in a signed folder, but not signed", hint=f"remove it, or {REMEDY}")
    return signed


def _is_valid(key: Any, entry: bytes, payload: bytes) -> bool:
    with suppress(InvalidSignature):
        key.verify(entry, _message(payload))
        return True
    return False
