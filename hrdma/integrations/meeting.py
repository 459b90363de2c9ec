"""How the nodes of a job meet on a board: a key-value store that a framework's cluster has anyway.

    <job>/token          secret, made by whoever comes first
    <job>/founder/<n>    the node that founds the cluster; n grows when that one is lost before others have joined
    <job>/node/<node>    where a node listens
    <job>/group/<name>   where rank 0 of a collective group listens, while it gathers

A node has a name of its own, which no other gets, also not the one that its host gets when it has died: what a dead node
left on the board is told from what a living one put there. All that is asked of the board is that of two who put a key without overwriting, one is the first. Knows no framework.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

from hrdma.errors import HrdmaError

__all__ = ["AGAIN", "Board", "first", "leave", "list_node", "seeds", "token"]

AGAIN = 0.05  # seconds before something on the board is looked at again


class Board(Protocol):
    """The key-value store. Any process of the cluster may call it."""

    def put(self, key: str, value: str, *, overwrite: bool = True) -> None: ...
    def get(self, key: str) -> str | None: ...
    def delete(self, key: str) -> None: ...
    def keys(self, prefix: str) -> list[str]: ...


def first(board: Board, key: str, value: str) -> str:
    """The value of whoever comes first, the same for all.

    Raises
    ------
    HrdmaError
        The board does not keep what is put there.
    """
    board.put(key, value, overwrite=False)
    found = board.get(key)
    if found is None:
        raise HrdmaError(f"the cluster's key-value store has forgotten {key}: is the job over?")
    return found


def token(board: Board, job: str) -> str:
    """The secret of a job."""
    return first(board, f"{job}/token", secrets.token_hex(16))


def list_node(board: Board, job: str, node: str, address: str, port: int) -> None:
    """Says where a node listens."""
    board.put(f"{job}/node/{node}", f"{address} {port}")


def leave(board: Board, job: str) -> None:
    """Takes everything of a job off the board."""
    for key in board.keys(f"{job}/"):
        board.delete(key)


def seeds(
    board: Board, job: str, me: str, alive: Callable[[], set[str]], deadline: float
) -> list[tuple[str, int]]:  # fmt: skip
    """The nodes that a node is to join: none for the one that founds the cluster.

    Parameters
    ----------
    alive : callable
        The nodes that the framework counts as alive, those that are coming up included.
    deadline : float
        On the monotonic clock.

    Raises
    ------
    TimeoutError
        The founder is alive and has not listed its node.
    """
    while True:
        nodes = alive() | {me}
        others = [key for key in board.keys(f"{job}/node/") if key.rpartition("/")[2] in nodes - {me}]
        places = [place.split() for key in others if (place := board.get(key)) is not None]
        if places:
            return [(address, int(port)) for address, port in places]
        number = 0
        while (founder := first(board, f"{job}/founder/{number}", me)) not in nodes:
            number += 1
        if founder == me:
            return []
        if time.monotonic() > deadline:
            raise TimeoutError(f"node {founder}, which founds the cluster, does not come up")
        time.sleep(AGAIN)
