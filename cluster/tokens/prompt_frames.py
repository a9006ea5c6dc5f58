"""Messages between a router and its prompt_process.py: frames of a JSON head and a body.

A frame is the sizes of both in bytes (two uint32), the head, the body.
"""

import json
import struct
from typing import Any

Head = dict[str, Any]
Frame = tuple[bytes, bytes]  # sizes and head, and the body, which is not copied

SIZES = struct.Struct("<II")
CHAT, TEXT, BODY = "chat", "text", "body"  # kinds of task


def to_frame(head: Head, body: bytes = b"") -> Frame:
    text = json.dumps(head).encode()
    return SIZES.pack(len(text), len(body)) + text, body
