"""hrdma in a Ray cluster of two hosts: references through tasks and actors, who owns what, jobs that end, collective groups."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import numpy as np
import pytest

from hrdma.errors import ObjectLost, PeerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
HOSTS = ("first", "second")
N = 1 << 18  # elements: above what the directory keeps itself
SECONDS = 30.0


@pytest.fixture
def objects(cluster):
    from hrdma.integrations import ray as hrdma_ray

    return hrdma_ray.connect(timeout=SECONDS, capacity=256 << 20)


def eventually(check, what: str, seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, f"{what} did not come about within {seconds:g} s"
        time.sleep(0.05)


def lost(objects, ref) -> bool:
    try:
        objects.get(ref, timeout=SECONDS)
    except ObjectLost:
        return True
    return False


def remote(host: str):
    """A decorator: Ray runs it on this host."""
    import ray

    return ray.remote(num_cpus=0, resources={host: 1})


def workers(hosts):
    """Actors that put, reduce, and take part in collective groups; one on each host of the list."""

    class Worker:
        def connect(self):
            from hrdma.integrations import ray as hrdma_ray

            return hrdma_ray.connect(timeout=SECONDS, capacity=256 << 20)

        def put(self, value):
            return self.connect().put(np.full(N, value, "float32"))

        def total(self, refs):
            objects = self.connect()
            return float(objects.get(objects.reduce(refs))[-1])

        def join(self, size, rank, group):
            from ray.util import collective

            from hrdma.integrations import ray as hrdma_ray

            hrdma_ray.register()
            hrdma_ray.register()
            collective.init_collective_group(size, rank, backend="HRDMA", group_name=group)
            self.rank, self.size, self.group = rank, size, group

        def collectives(self):
            from ray.util import collective
            from ray.util.collective.types import ReduceOp

            n, rank, name = self.size, self.rank, self.group
            mine = np.arange(10) * n + rank
            everybody = [np.arange(10) * n + other for other in range(n)]
            x = mine.copy()
            collective.allreduce(x, name)
            assert np.array_equal(x, sum(everybody))
            x = mine.copy()
            collective.allreduce(x, name, ReduceOp.MAX)
            assert np.array_equal(x, everybody[-1])
            x = mine.copy()
            collective.reduce(x, 1, name, ReduceOp.SUM)
            assert np.array_equal(x, sum(everybody) if rank == 1 else mine)
            x = mine.copy()
            collective.broadcast(x, 1, name)
            assert np.array_equal(x, everybody[1])
            gathered = [np.zeros(10, mine.dtype) for _ in range(n)]
            collective.allgather(gathered, mine, name)
            assert np.array_equal(gathered, everybody)
            share = np.zeros(10, mine.dtype)
            collective.reducescatter(share, [mine + 100 * other for other in range(n)], name)
            assert np.array_equal(share, sum(everybody) + 100 * n * rank)
            if rank == 0:
                collective.send(mine, 1, name)
            elif rank == 1:
                x = np.zeros(10, mine.dtype)
                collective.recv(x, 0, name)
                assert np.array_equal(x, everybody[0])
            collective.barrier(name)
            return rank

        def allreduce(self, group):
            from ray.util import collective

            try:
                collective.allreduce(np.ones(10), group)
            except PeerError as error:
                return error.rank
            return None

        def leave(self, group):
            from ray.util import collective

            collective.destroy_collective_group(group)

    return [remote(host)(Worker).remote() for host in hosts]


def test_references_go_through_tasks(objects):
    import ray

    def double(ref):
        from hrdma.integrations import ray as hrdma_ray

        inside = hrdma_ray.connect(timeout=SECONDS, capacity=256 << 20)
        return {"here": inside.put(2 * inside.get(ref))}

    ref = objects.put(np.arange(N, dtype="float32"))
    found = [one["here"] for one in ray.get([remote(host)(double).remote(ref) for host in HOSTS], timeout=SECONDS)]
    assert len(objects.info()["nodes"]) == 2, "a node on each host"
    for each in found:
        assert np.array_equal(objects.get(each), 2 * np.arange(N))
    assert objects.get(objects.reduce(found))[-1] == 4 * (N - 1)
    from hrdma.integrations import ray as hrdma_ray

    assert hrdma_ray.connect() is objects


def test_what_an_actor_made_goes_with_it(objects):
    import ray

    first, second = workers(HOSTS)
    refs = ray.get([first.put.remote(1), second.put.remote(2)], timeout=SECONDS)
    assert ray.get([first.total.remote(refs), second.total.remote(refs)], timeout=SECONDS) == [3, 3]
    view = objects.get(refs[1])
    ray.kill(second)
    eventually(lambda: lost(objects, refs[1]), "the end of the actor's objects")
    assert view[0] == 2 and objects.get(refs[0])[0] == 1


def test_a_killed_node_is_made_anew(objects):
    import ray
    from ray.util import list_named_actors

    def connect_and_kill(put):
        from hrdma.integrations import ray as hrdma_ray

        inside = hrdma_ray.connect(timeout=SECONDS, capacity=256 << 20)
        ref = inside.put(put)
        job, host = hrdma_ray._where()
        ray.kill(ray.get_actor(f"node {job} {host}", namespace=hrdma_ray.NAMESPACE))
        until = time.monotonic() + SECONDS
        while not inside.closed and time.monotonic() < until:
            time.sleep(0.01)
        again = hrdma_ray.connect(timeout=SECONDS, capacity=256 << 20)
        return again is not inside, ref, again.put(put)

    function = remote("second")(connect_and_kill)
    anew, gone, there = ray.get(function.remote(np.arange(N)), timeout=2 * SECONDS)
    assert anew
    assert lost(objects, gone)
    assert objects.get(there)[-1] == N - 1
    assert len([one for one in list_named_actors(True) if one["namespace"] == "hrdma"]) == 2


def test_all_nodes_killed(objects):
    """The places that they left on the board are not joined: hosts found a new cluster."""
    import ray

    from hrdma.integrations import ray as hrdma_ray

    def put():
        from hrdma.integrations import ray as hrdma_ray

        while True:  # its process may have a client of the node before
            try:
                return hrdma_ray.connect(timeout=SECONDS, capacity=256 << 20).put(np.arange(N))
            except PeerError:
                time.sleep(0.1)

    function = remote("second")(put)
    ray.get(function.remote(), timeout=SECONDS)
    job, _ = hrdma_ray._where()
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["name"].startswith(f"node {job} "):
            ray.kill(ray.get_actor(one["name"], namespace=hrdma_ray.NAMESPACE))
    eventually(lambda: objects.closed, "the end of the client")
    there = ray.get(function.remote(), timeout=2 * SECONDS)
    again = hrdma_ray.connect(timeout=SECONDS, capacity=256 << 20)
    assert again.get(there, timeout=SECONDS)[-1] == N - 1


def test_a_node_that_is_up_and_cannot_be_reached(objects, monkeypatch):
    from hrdma.integrations import ray as hrdma_ray

    tries = []

    def refuse(*_, **__):
        tries.append(1)
        raise PeerError("of another opinion", operation="connect")

    monkeypatch.setattr(hrdma_ray, "reach", refuse)
    monkeypatch.setattr(hrdma_ray, "_client", None)
    with pytest.raises(TimeoutError, match="is up and cannot be reached within 8 s: of another opinion"):
        hrdma_ray.connect(timeout=8)
    assert 1 < len(tries) <= 8 / hrdma_ray.AGAIN + 2


def test_a_node_that_does_not_come_up_says_why(cluster, objects):
    """Its founder has not listed itself: what stands on the board of a job that has only just begun."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK, cluster.address], capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert "which founds the cluster, does not come up" in done.stdout, done.stdout + done.stderr


STUCK = """
import sys, ray
from hrdma.errors import HrdmaError
from hrdma.integrations import ray as r
ray.init(address=sys.argv[1], log_to_driver=False)
class Founder:  # has a name like that of a node, and is none
    def me(self): return ray.get_runtime_context().get_actor_id()
job = r._where()[0]
founder = ray.remote(Founder).options(name=f"node {job} elsewhere", namespace=r.NAMESPACE, num_cpus=0).remote()
r.BOARD.put(f"{job}/founder/0", ray.get(founder.me.remote(), timeout=20))
try: r.connect(timeout=16, capacity=1 << 26)
except HrdmaError as error: print(error)
"""

DRIVER = """
import sys
import numpy as np, ray
from hrdma.integrations import ray as hrdma_ray
ray.init(address=sys.argv[1], log_to_driver=False)
objects = hrdma_ray.connect(timeout=30, capacity=1 << 26)
print(hrdma_ray._where()[0], objects.put(np.arange(100000)), flush=True)
"""


def test_nodes_end_with_their_job(cluster, objects):
    from ray.util import list_named_actors

    from hrdma.integrations.ray import BOARD, NAMESPACE
    from hrdma.objects import ObjectRef

    done = subprocess.run(
        [sys.executable, "-c", DRIVER, cluster.address], capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert done.returncode == 0, done.stderr
    job, text = done.stdout.split()
    with pytest.raises(ValueError, match="is of another job"):
        objects.get(ObjectRef.parse(text))

    def names():
        found = [one["name"] for one in list_named_actors(True) if one["namespace"] == NAMESPACE]
        return [name for name in found if name.startswith(f"node {job} ")]

    eventually(lambda: not names() and not BOARD.keys(f"{job}/"), "the end of the other job's nodes")
    assert objects.get(objects.put(np.arange(N)))[5] == 5, "those of this one go on"


def test_collective_groups(cluster):
    import ray
    from ray.util import collective

    from hrdma.integrations import ray as hrdma_ray

    actors = workers(["first", "second", "first"])
    for group, members in (("all", actors), ("two", actors[1:])):
        ray.get([one.join.remote(len(members), i, group) for i, one in enumerate(members)], timeout=SECONDS)
        assert ray.get([one.collectives.remote() for one in members], timeout=SECONDS) == list(range(len(members)))
    hrdma_ray.register()
    declared = workers(["first", "second"])
    ray.get([one.join.remote(1, 0, f"alone {i}") for i, one in enumerate(declared)], timeout=SECONDS)
    collective.create_collective_group(declared, 2, [1, 0], backend="HRDMA", group_name="declared")
    assert ray.get([one.allreduce.remote("declared") for one in declared], timeout=SECONDS) == [None, None]
    ray.get([one.leave.remote("declared") for one in declared], timeout=SECONDS)

    ray.kill(actors[2])
    assert ray.get([one.allreduce.remote("all") for one in actors[:2]], timeout=SECONDS) == [2, 2], "who is lost"


def test_not_in_a_cluster():
    pytest.importorskip("ray", reason="ray is not installed; make test-ray installs it")
    text = "from hrdma.integrations import ray as r\ntry: r.connect()\nexcept RuntimeError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=SECONDS)
    assert "call ray.init() first" in done.stdout, done.stderr


def test_example_async_sgd(cluster):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install hrdma[demo]")
    command = [sys.executable, "-m", "hrdma.examples.async_sgd", "--address", cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"test accuracy 0\.9\d+ after 400 rounds, [\d.]+ a second, through hrdma", done.stdout)
    done = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "after 1 rounds" in done.stdout, "too little training is a failure"


@pytest.mark.parametrize("through", ["hrdma", "ray"])
def test_averages_go_on_without_an_actor_and_with_it_again(objects, through):
    import ray

    from hrdma.examples.arriving import WAYS, Source

    class Number(Source):
        def __init__(self, value):
            self.value = value

        def compute(self, weights):
            return np.full(weights.shape, self.value, weights.dtype)

    kind = ray.remote(num_cpus=0, max_restarts=-1)(Number)
    actors = [kind.remote(value) for value in (1, 2, 3)]
    averages, weights = WAYS[through](actors, 2), np.zeros(N, "float32")
    eventually(lambda: averages.step(weights)[-1] < 2.5, "a gradient of the first")
    ray.kill(actors[0], no_restart=False)
    assert [averages.step(weights)[-1] in (1.5, 2, 2.5) for _ in range(4)] == [True] * 4
    eventually(lambda: averages.step(weights)[-1] < 2.5, "a gradient of the first, restarted")
    averages.finish()
    assert sorted(averages.idle) == [0, 1, 2]


def test_a_gradient_goes_with_its_host_though_its_call_had_ended_well(objects):
    import ray

    from hrdma.examples.arriving import Source, gone

    class Same(Source):
        def compute(self, weights):
            return weights

    actor = ray.remote(num_cpus=0)(Same).remote()
    call = actor.through_hrdma.remote(objects.put(np.zeros(N, "float32")), "whose host is gone")
    later = actor.through_hrdma.remote(objects.ref("weights to come"), "that is still to come")
    ray.wait([call], timeout=60)
    nodes = objects.info()["nodes"]
    assert not gone(call, nodes) and not gone(later, nodes)
    assert gone(call, [node for node in nodes if node != ray.get(call)])
    assert not gone(later, []), "it has not answered yet"
    objects.put(np.zeros(1, "float32"), id="weights to come")
    assert not gone(call, [ray.get(later), *nodes])


@pytest.mark.parametrize("through", ["hrdma", "ray"])
@pytest.mark.parametrize(
    ("example", "enough", "too_little"),
    [("cart_pole", [], ["--rounds", "1"]), ("ensemble", ["--requests", "20"], None)],
)
def test_examples(cluster, example, enough, too_little, through):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install hrdma[demo]")
    command = [sys.executable, "-m", f"hrdma.examples.{example}", "--address", cluster.address, "--through", through]
    done = subprocess.run([*command, *enough], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and f"a second, through {through}" in done.stdout, done.stdout + done.stderr
    if too_little is not None and through == "hrdma":
        done = subprocess.run([*command, *too_little], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "after 1 rounds" in done.stdout, "too little training is a failure"
