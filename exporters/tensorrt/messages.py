"""Messages between two processes over pipes: one line of JSON, then as many bytes as it announces. No pickle.

The process at the other end runs a file that may be hostile, so nothing of what it says is more than data, and neither
line nor bytes may be larger than expected.
"""

import json
from collections.abc import Mapping
from typing import IO, Any

LONGEST_LINE = 1 << 24  # the inspector's account of a large engine takes a few megabytes
MOST_BYTES = 1 << 34


def send(pipe: IO[bytes], message: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
    """Raises BrokenPipeError when nobody listens any more."""
    pipe.write(json.dumps({**message, "bytes": len(data)}).encode() + b"\n")
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytearray]:
    """The next message and its bytes.

    Raises:
        EOFError: the other end is gone.
        ValueError: what came is no message.
    """
    line = pipe.readline(LONGEST_LINE)
    if not line:
        raise EOFError
    message = json.loads(line)
    count = message.pop("bytes", None) if isinstance(message, dict) else None
    if not isinstance(count, int) or not 0 <= count <= MOST_BYTES:
        raise ValueError("not a message")
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        read = pipe.readinto(view[at:])  # type: ignore[attr-defined]
        if not read:
            raise EOFError
        at += read
    return message, data
