"""hrdma inside a Ray cluster: objects in drivers, tasks and actors, and a backend for Ray's collective groups.

    import ray
    from hrdma.integrations import ray as hrdma_ray

    @ray.remote
    def gradient(weights):  # a reference, passed like any other value
        objects = hrdma_ray.connect()
        return objects.put(step(objects.get(weights)))

    objects = hrdma_ray.connect()
    parts = ray.get([gradient.remote(objects.put(weights)) for _ in range(8)])
    total = objects.get(objects.reduce(parts, "avg", count=4))

There is no service to start. The first process of a Ray job that connects on a host makes that host's node, an actor that
takes no CPU of Ray's; nodes meet, and all find the job's token, in Ray's own key-value store (`meeting.py`). A node is a
detached actor, since it has to outlive the task that happened to make it; it ends with the job.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hrdma.config import Config
from hrdma.errors import HrdmaError, PeerError
from hrdma.integrations.meeting import AGAIN, leave, list_node, seeds, token
from hrdma.log import configure, logger
from hrdma.objects import Client
from hrdma.objects.connecting import reach
from hrdma.objects.node import Node
from hrdma.objects.sessions import Sessions, local_name
from hrdma.objects.store import usual_capacity

__all__ = ["connect", "register"]

NAMESPACE = "hrdma"  # of the actors and keys
WATCH = 3.0  # seconds between two looks whether the job is over
SHARE = 0.5  # of the time of whoever wants a node: what the node may take, so that it says what was wrong

_lock = threading.Lock()
_client: Client | None = None
_place: tuple[int, str, str] | None = None


def connect(*, capacity: int | None = None, timeout: float | None = None) -> Client:
    """This process's client of the objects of its Ray job; the same one whenever it is called.

    Parameters
    ----------
    capacity : int, optional
        Bytes of this host's store, where this call makes its node; None: three tenths of the memory.
    timeout : float, optional
        Seconds that this call, and by default later ones of the client, may take; None: ``HRDMA_TIMEOUT``.

    Returns
    -------
    hrdma.objects.Client
        Its references can be passed to and returned from tasks and actors, alone or inside other values.

    Raises
    ------
    RuntimeError
        Ray is not initialised here, or this process only talks to a cluster through Ray Client.
    TimeoutError, HrdmaError
        The node did not come up.

    Notes
    -----
    **Who owns what.** What an actor makes goes with the actor, unless it is a reduction with a name, which is everybody's.
    What drivers and tasks make stays until it is deleted, or until the job ends: Ray may run the next task elsewhere and
    end the process of this one. Close the client (or let the actor end) only when its objects are not needed any more.
    """
    global _client, _place
    config = Config.load(timeout=timeout)
    deadline = time.monotonic() + config.timeout
    job, host = _where()
    if not _lock.acquire(timeout=config.timeout):
        raise TimeoutError(f"another thread is connecting, and has not come through within {config.timeout:g} s")
    try:
        place = (os.getpid(), job, host)
        if _client is None or _client.closed or _place != place:
            _client, _place = _connect(job, host, capacity, config, deadline), place
        return _client
    finally:
        _lock.release()


def _where() -> tuple[str, str]:
    """Of this process: its Ray job, and its host as Ray knows it."""
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialised in this process: call ray.init() first")
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "this process is not in the cluster, it talks to it through Ray Client: connect in a task or actor"
        )
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


def _connect(job: str, host: str, capacity: int | None, config: Config, deadline: float) -> Client:
    config = dataclasses.replace(config, token=token(BOARD, job))
    in_actor = ray.get_runtime_context().get_actor_id() is not None
    up, why = False, "it ended each time, as it does when its job is over"
    while True:
        try:
            return reach(config, "", host, deadline, owner=in_actor)
        except ConnectionRefusedError:
            if up:
                why = "it has no socket that this process can see: has it another user or network namespace?"
        except PeerError as error:
            why = str(error)
        left = deadline - time.monotonic()
        if left <= 0:
            state = "is up and cannot be reached" if up else "did not come up"
            raise TimeoutError(f"the node of this host {state} within {config.timeout:g} s: {why}")
        actor = (
            ray.remote(_NodeActor)
            .options(
                name=f"{_title(job)}{host}",
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(host, soft=False),
            )
            .remote(job, capacity, SHARE * left)
        )
        try:
            up = ray.get(actor.up.remote(), timeout=left)
        except GetTimeoutError:
            if up:
                continue  # it was a moment ago: what keeps us from it is told
            raise TimeoutError(f"the node of this host did not come up within {config.timeout:g} s") from None
        except RayActorError as error:
            up = False
            if "The actor died because of an error" in str(error):
                raise HrdmaError(f"the node of this host did not come up: {error}") from None
        time.sleep(AGAIN)  # where it was ending, its name is free in a moment


class _NodeActor:
    """The node of a host, in the process of this actor, until its job is over."""

    def __init__(self, job: str, capacity: int | None, timeout: float) -> None:
        context = ray.get_runtime_context()
        self._job, self._self, me = job, context.current_actor, context.get_actor_id()
        config = Config.load(token=token(BOARD, job), timeout=timeout)
        configure(config.log_level)
        joined = seeds(BOARD, job, me, lambda: _alive(job), time.monotonic() + timeout)
        room = usual_capacity() if capacity is None else capacity
        self._node = Node(config, (ray.util.get_node_ip_address(), 0), joined, room)
        self._node.start(config.timeout)  # what it raises is what whoever wants this node is told
        self._node.broken = self._leave
        self._sessions = Sessions(self._node, local_name(self._node.key, "", context.get_node_id()), linger=None)
        list_node(BOARD, job, me, self._node.cluster.host, self._node.cluster.port)
        threading.Thread(target=self._watch, name="hrdma-job", daemon=True).start()

    def up(self) -> bool:
        return True

    def _watch(self) -> None:
        while not _over(self._job):
            time.sleep(WATCH)
        try:
            self._sessions.close()
            self._node.close()
            leave(BOARD, self._job)
        finally:
            self._leave()

    def _leave(self) -> None:
        ray.kill(self._self)


def _title(job: str) -> str:
    """What the names of a job's nodes begin with; the host comes after it."""
    return f"node {job} "


def _over(job: str) -> bool:
    """Whether a job has ended. Ray has no public name for this that works without its dashboard."""
    from ray._private.worker import global_worker

    try:
        found = {number.hex(): info.is_dead for number, info in global_worker.gcs_client.get_all_job_info().items()}
    except Exception as error:  # Ray's control store does not answer: nobody knows, yet
        logger.warning("ray: cannot ask whether job %s is over: %s", job, error)
        return False
    return found.get(job, True)


class _Store:
    """Ray's key-value store, which its own collective groups meet in as well."""

    def put(self, key: str, value: str, *, overwrite: bool = True) -> None:
        internal_kv._internal_kv_put(key, value, overwrite, namespace=NAMESPACE)

    def get(self, key: str) -> str | None:
        found = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        return None if found is None else found.decode()

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(key, namespace=NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)]


def _alive(job: str) -> set[str]:
    """The nodes of a job, by the ids of their actors: those that are coming up, and those that are up."""
    found = set()
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].startswith(_title(job)):
            try:
                found.add(ray.get_actor(one["name"], namespace=NAMESPACE)._actor_id.hex())
            except ValueError:
                pass  # it has ended meanwhile
    return found


BOARD = _Store()


# --- collective groups ---


def register(name: str = "HRDMA") -> None:
    """Makes hrdma a backend of ``ray.util.collective`` in this process.

    Call it in the driver and in every actor of a group, before the group is made; calling it again does nothing. Then
    ``init_collective_group(size, rank, backend="HRDMA")`` and the calls of ``ray.util.collective`` work on numpy arrays
    and on torch tensors of the CPU.

    Parameters
    ----------
    name : str
        Of the backend.

    Raises
    ------
    RuntimeError
        This version of Ray has no registry of backends.
    """
    try:
        from ray.util.collective import backend_registry, is_backend_available
    except ImportError:
        raise RuntimeError(f"Ray {ray.__version__} has no registry of collective backends: upgrade it") from None
    from hrdma.integrations.ray_group import Group

    if not is_backend_available(name):
        backend_registry.register_collective_backend(name, Group)
