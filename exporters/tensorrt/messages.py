"""Messages between two processes over pipes: one line of JSON, then as many bytes as it states. No pickle.

The process at the other end may run a malicious file, so a message is only data, and the sizes of its line and bytes
are limited.
"""

import json
from collections.abc import Mapping
from typing import IO, Any

MAX_LINE = 1 << 24  # the inspector output of a large engine has a few megabytes
MAX_BYTES = 1 << 34


def send(pipe: IO[bytes], message: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
    """Raises BrokenPipeError if the other end is closed."""
    pipe.write(json.dumps({**message, "bytes": len(data)}).encode() + b"\n")
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytearray]:
    """The next message and its bytes.

    Raises:
        EOFError: the other end is closed.
        ValueError: not a message.
    """
    line = pipe.readline(MAX_LINE)
    if not line:
        raise EOFError
    message = json.loads(line)
    count = message.pop("bytes", None) if isinstance(message, dict) else None
    if not isinstance(count, int) or not 0 <= count <= MAX_BYTES:
        raise ValueError("not a message")
    data = bytearray(count)
    view, position = memoryview(data), 0
    while position < count:
        size = pipe.readinto(view[position:])  # type: ignore[attr-defined]
        if not size:
            raise EOFError
        position += size
    return message, data
