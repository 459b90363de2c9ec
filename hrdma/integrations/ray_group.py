"""A collective group of Ray actors, as ``ray.util.collective`` wants its backends: each call becomes one of a communicator.

Ranks meet in Ray's key-value store: rank 0 listens, says where, and takes that back when all have come. A process may be in
several groups; each has its own connections.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import socket
import time
from typing import Any

import numpy as np
import ray
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from hrdma.communicator import Communicator
from hrdma.config import Config
from hrdma.integrations.meeting import AGAIN
from hrdma.integrations.ray import BOARD
from hrdma.log import configure
from hrdma.runtime import WORLD_ID, Runtime
from hrdma.world import World

__all__ = ["Group"]

OPS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVERAGE": "avg"}  # Ray's names and ours


class Group(BaseGroup):
    """One rank of a group. Ray makes it, calls it with what the user gave in lists of one, and destroys it.

    Raises
    ------
    TimeoutError, PeerError
        As those of :class:`hrdma.Communicator`: a lost rank is an error that names it, in every call of the others.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        config = Config.load()
        configure(config.log_level, rank)
        deadline = time.monotonic() + config.timeout
        key = f"{ray.get_runtime_context().get_job_id()}/group/{group_name}"
        try:
            listener = _listen(key) if rank == 0 else None
            place = _meeting(key, deadline)
            world = World(rank, world_size, master_addr=place["address"], master_port=place["port"], listener=listener)
            runtime = Runtime(dataclasses.replace(config, token=place["token"]), world)
        finally:
            if rank == 0:
                BOARD.delete(key)
        try:
            self._comm = Communicator(runtime, WORLD_ID, range(world_size))
        except BaseException:
            runtime.close(0.0)
            raise

    def destroy_group(self) -> None:
        self._comm.close()  # the runtime with it

    @classmethod
    def backend(cls) -> str:
        return "HRDMA"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        self._comm.allreduce(_array(tensor), _op(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:
        self._comm.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        root = getattr(reduce_options, "root_rank", 0)
        self._comm.reduce(_array(tensor), root, _op(reduce_options))

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        mine = _array(tensor)
        found = np.empty((self.world_size, *mine.shape), mine.dtype)
        self._comm.allgather(mine, found)
        for target, value in zip(_arrays(tensor_list), found):
            target[...] = value

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        self._comm.broadcast(_array(tensor), getattr(broadcast_options, "root_rank", 0))

    def reducescatter(self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None) -> None:
        shares = np.stack(_arrays(tensor_list))
        self._comm.reduce_scatter(shares, _op(reducescatter_options), out=_array(tensor))

    def send(self, tensor: list[Any], send_options: Any) -> None:
        self._comm.send(_array(tensor), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        self._comm.recv(_array(tensor), recv_options.src_rank)


def _listen(key: str) -> socket.socket:
    """Rank 0's socket, said to the others."""
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    try:
        place = {"address": address, "port": listener.getsockname()[1], "token": secrets.token_hex(16)}
        BOARD.put(key, json.dumps(place))
    except BaseException:
        listener.close()
        raise
    return listener


def _meeting(key: str, deadline: float) -> dict[str, Any]:
    while (found := BOARD.get(key)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 of the collective group {key.rpartition('/')[2]!r} does not come")
        time.sleep(AGAIN)
    return json.loads(found)


def _op(options: Any) -> Any:
    return "sum" if options is None else OPS[options.reduceOp.name]


def _array(tensors: list[Any]) -> np.ndarray:
    """The one tensor of a list, as an array on the same memory."""
    (tensor,) = tensors
    return np.asarray(tensor.detach() if hasattr(tensor, "detach") else tensor)


def _arrays(tensors: list[list[Any]]) -> list[np.ndarray]:
    """The tensors of the one list in a list."""
    (found,) = tensors
    return [_array([tensor]) for tensor in found]
