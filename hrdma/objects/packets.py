"""Messages of clients and nodes in frames: several in one, the contents of small objects as bytes behind the JSON.

    header  {"all": [{"verb": "put", "inline": 3, ...}, {"verb": "get", ...}], ...}  the 3 bytes

What leads to one another in one turn of a thread leaves in one frame: it is read, and its reader woken, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hrdma.control.wire import Kind, encode
from hrdma.objects.asker import Body

__all__ = ["MOST", "pack", "unpack"]

MOST = 1 << 17  # bytes of a frame with several messages: a packet of a Unix socket has to fit into its buffer


def pack(messages: Sequence[Body], *, limit: int, **more: Any) -> list[bytes]:
    """Frames of these messages, in order: one, or as many as it takes so that those of several have at most `MOST` bytes.

    Parameters
    ----------
    messages : sequence of dict
        "inline" of each, where it is there and not None, is bytes.
    limit : int
        Bytes that one message alone may take.
    more
        What all of them share.

    Raises
    ------
    ValueError
        One message alone is too long.
    """
    if not messages:
        return []
    heads, contents = [], []
    for message in messages:
        content = message.get("inline")
        if content is not None:
            contents.append(content)
            message = {**message, "inline": len(content)}
        heads.append(message)
    several = len(messages) > 1
    try:
        most = min(limit, MOST) if several else limit
        return [encode(Kind.OBJECT, {"all": heads, **more}, limit=most, tail=b"".join(contents))]
    except ValueError:
        if not several:
            raise
    half = len(messages) // 2
    return [*pack(messages[:half], limit=limit, **more), *pack(messages[half:], limit=limit, **more)]


def unpack(body: Body) -> list[Body]:
    """The messages of a frame.

    Raises
    ------
    KeyError, TypeError, ValueError
        They are not as `pack` makes them.
    """
    messages, tail, at = body["all"], body["tail"], 0
    for message in messages:
        length = message.get("inline")
        if length is not None:
            if type(length) is not int or not 0 <= length <= len(tail) - at:
                raise ValueError(f"content of {length!r} bytes, of which {len(tail) - at} are there")
            message["inline"] = tail[at : at + length]
            at += length
    if at != len(tail):
        raise ValueError(f"{len(tail) - at} bytes too many")
    return list(messages)
