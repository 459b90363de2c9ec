"""How the nodes of a job find each other on a board, whoever comes first and whoever is lost: no framework needed."""

from __future__ import annotations

import threading
import time

import pytest

from hrdma.errors import HrdmaError
from hrdma.integrations.meeting import first, leave, list_node, seeds, token

JOB = "01000000"


class Dict:
    """A board of one process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, key, value, *, overwrite=True):
        with self._lock:
            if overwrite or key not in self.kept:
                self.kept[key] = value

    def get(self, key):
        return self.kept.get(key)

    def delete(self, key):
        self.kept.pop(key, None)

    def keys(self, prefix):
        return [key for key in list(self.kept) if key.startswith(prefix)]


@pytest.fixture
def board():
    return Dict()


def soon() -> float:
    return time.monotonic() + 5


def test_all_have_the_token_of_the_first(board):
    assert token(board, JOB) == token(board, JOB) != token(board, "02000000")


def test_one_founds_and_the_others_join_it(board):
    """All at once: whoever founds the cluster lists itself late, and nobody else founds another."""
    hosts = {f"host{i}" for i in range(6)}
    found: dict[str, list[tuple[str, int]]] = {}

    def come(host: str) -> None:
        found[host] = seeds(board, JOB, host, lambda: hosts, soon())
        time.sleep(0.1)
        list_node(board, JOB, host, "10.0.0.1", 1000 + int(host[-1]))

    threads = [threading.Thread(target=come, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    founders = [host for host, joined in found.items() if not joined]
    assert len(founders) == 1
    port = 1000 + int(founders[0][-1])
    assert all(("10.0.0.1", port) in joined for host, joined in found.items() if host != founders[0])


def test_a_lost_founder_is_replaced_once(board):
    assert seeds(board, JOB, "a", lambda: {"a", "b", "c"}, soon()) == []
    alive = {"b", "c"}  # a is lost before it has listed its node
    assert seeds(board, JOB, "b", lambda: alive, soon()) == []
    with pytest.raises(TimeoutError, match="node b, which founds the cluster"):
        seeds(board, JOB, "c", lambda: alive, time.monotonic() + 0.1)
    list_node(board, JOB, "b", "::1", 7)
    assert seeds(board, JOB, "c", lambda: alive, soon()) == [("::1", 7)]


def test_lost_nodes_are_not_joined(board):
    for host, port in (("a", 1), ("b", 2)):
        list_node(board, JOB, host, "10.0.0.1", port)
    assert seeds(board, JOB, "c", lambda: {"b", "c"}, soon()) == [("10.0.0.1", 2)]


def test_when_all_nodes_have_died_their_hosts_found_a_new_cluster(board):
    """And join none of the dead ones, whose places are still on the board."""
    for node in "ab":
        list_node(board, JOB, node, "10.0.0.1", 1)
    assert first(board, f"{JOB}/founder/0", "a") == "a"
    assert seeds(board, JOB, "a again", lambda: {"a again", "b again"}, soon()) == []
    list_node(board, JOB, "a again", "10.0.0.1", 2)
    assert seeds(board, JOB, "b again", lambda: {"a again", "b again"}, soon()) == [("10.0.0.1", 2)]


def test_a_job_leaves_nothing_of_its_own(board):
    for job in (JOB, "02000000"):
        token(board, job)
        list_node(board, job, "a", "10.0.0.1", 1)
    leave(board, JOB)
    assert board.keys(JOB) == [] and len(board.keys("02000000")) == 2


def test_a_board_that_forgets(board):
    board.put = lambda *_, **__: None
    with pytest.raises(HrdmaError, match="has forgotten k: is the job over"):
        first(board, "k", "v")
