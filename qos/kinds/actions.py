"""The two actions that trees need, as both classifiers carry them: redirect to another device, and set the packet's priority.

No kind of its own: `u32` and `flower` use it.
"""

from __future__ import annotations

import struct

from hrdma.qos.wire import NESTED, attribute, attributes, text

__all__ = ["decode", "encode"]

FIRST = 1  # of the actions, of which there is one
KIND, OPTIONS = 1, 2  # numbers of attributes of an action
PARMS, SKBEDIT_PRIORITY = 2, 3  # ... of its options
STOLEN, PIPE, EGRESS_REDIR = 4, 3, 1
_GENERIC = struct.Struct("=8xi8x")  # what becomes of the packet; without number, capabilities and counts
_MIRRED = struct.Struct("=8xi8xiI")  # the same, the way, the device


def encode(redirect: int, priority: int | None) -> bytes:
    """The value of a classifier's action attribute; empty where neither is wanted.

    Parameters
    ----------
    redirect : int
        Index of the device that gets the packet; 0 is none.
    priority : int or None
        skb->priority from here on.
    """
    if redirect:
        kind, options = "mirred", attribute(PARMS, _MIRRED.pack(STOLEN, EGRESS_REDIR, redirect))
    elif priority is not None:
        kind, options = "skbedit", attribute(PARMS, _GENERIC.pack(PIPE))
        options += attribute(SKBEDIT_PRIORITY, struct.pack("=I", priority))
    else:
        return b""
    return attribute(FIRST, text(KIND, kind) + attribute(OPTIONS | NESTED, options))


def decode(value: bytes) -> tuple[int, int | None]:
    """`redirect` and `priority` of such an attribute."""
    redirect, priority = 0, None
    if value:
        action = attributes(attributes(value)[FIRST])
        options = attributes(action[OPTIONS])
        if action[KIND] == b"mirred\0":
            *_, redirect = _MIRRED.unpack(options[PARMS])
        elif action[KIND] == b"skbedit\0" and SKBEDIT_PRIORITY in options:
            (priority,) = struct.unpack("=I", options[SKBEDIT_PRIORITY])
    return redirect, priority
