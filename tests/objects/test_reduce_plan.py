"""Reductions planned in arrival order: shapes, thresholds, and exact sums whoever dies and when."""

from __future__ import annotations

import random
import time

import pytest

from hrdma.objects.plan import Plan
from hrdma.objects.shape import BINARY, CHAIN, ROOT, STAR, cost, degree, parent


def test_positions():
    seven = set(range(7))
    assert [parent(BINARY, position, seven, 6) for position in range(7)] == [1, 3, 1, ROOT, 5, 3, 5]
    assert [parent(BINARY, position, set(range(5)), 4) for position in range(5)] == [1, 3, 1, ROOT, 3]
    assert [parent(BINARY, position, {0, 2, 4}, 4) for position in (0, 2, 4)] == [ROOT] * 3
    assert [parent(CHAIN, position, {0, 2, 3}, 3) for position in (0, 2, 3)] == [2, 3, ROOT]
    assert parent(STAR, 4, seven, 6) == ROOT


def test_thresholds_are_the_crossovers():
    """Chain beats binary above B L (n - log2 n), star beats binary below B L (log2 n - 1) / (n - 2); n = 16."""
    latency, bandwidth, n = 750e-6, 9.68 * 2**30 / 8, 16
    low, high = bandwidth * latency * 3 / 14, bandwidth * latency * 12
    assert degree(n, int(low * 0.99), latency, bandwidth) == STAR
    assert degree(n, int(low * 1.01), latency, bandwidth) == BINARY
    assert degree(n, int(high * 0.99), latency, bandwidth) == BINARY
    assert degree(n, int(high * 1.01), latency, bandwidth) == CHAIN
    assert cost(CHAIN, n, 1 << 25, latency, bandwidth) < cost(STAR, n, 1 << 25, latency, bandwidth)


class Machine:
    """Runs orders on sets instead of arrays: a sum is the list of the objects in it."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        self.plan, self.draw = plan, draw
        self.sums: dict[tuple[int, int], dict] = {}  # (position, attempt)
        self.result = None

    def take(self) -> None:
        for order in self.plan.orders():
            sum_ = self.sums.setdefault(
                (order.position, order.attempt), {"in": [], "refs": order.refs, "has": list(order.refs)}
            )
            assert sum_["refs"] == order.refs, "objects of an attempt may not change"
            assert set(sum_["in"]) <= {(c.position, c.attempt) for c in order.children}, "a child was taken back"
            sum_.update(order=order)

    def complete(self, key) -> bool:
        sum_ = self.sums.get(key)
        return sum_ is not None and sum_["order"].closed and len(sum_["in"]) == len(sum_["order"].children)

    def step(self, dead: set[int]) -> bool:
        moves = []
        for key, sum_ in self.sums.items():
            order = sum_["order"]
            if order.node in dead:
                continue
            moves += [
                (key, child)
                for child in order.children
                if (child.position, child.attempt) not in sum_["in"]
                and child.node not in dead
                and self.complete((child.position, child.attempt))
            ]
        if moves:
            key, child = self.draw.choice(moves)
            self.sums[key]["in"].append((child.position, child.attempt))
            self.sums[key]["has"] += self.sums[child.position, child.attempt]["has"]
            self.plan.absorbed(child.position, child.attempt, key[1])
        root = (ROOT, self.plan.attempt)
        if self.complete(root) and self.plan.root not in dead:
            parts = self.plan.finish(self.plan.attempt)
            if parts is not None:
                self.result = (sorted(parts), sorted(self.sums[root]["has"]))
        return bool(moves)


@pytest.mark.parametrize("shape", [STAR, BINARY, CHAIN])
@pytest.mark.parametrize("seed", range(80))
def test_every_sum_is_exact(shape, seed):
    draw = random.Random(seed)
    nodes = list(range(draw.randint(1, 8)))
    total = draw.randint(1, 16)
    count = draw.randint(1, total)
    where = {f"r{i}": draw.choice(nodes) for i in range(total)}
    plan = Plan(count, draw.choice(nodes), shape)
    machine = Machine(plan, draw)
    waiting, dead = list(where), set()
    fresh = 100
    for _ in range(400):
        what = draw.random()
        if what < 0.25 and waiting:
            ref = waiting.pop(draw.randrange(len(waiting)))
            plan.arrive(ref, where[ref])
        elif what < 0.4:
            machine.take()
        elif what < 0.45:
            node = draw.choice([node for node in nodes if node not in dead])
            nodes.append(fresh)
            fresh += 1
            dead.add(node)
            for ref in where:
                if where[ref] == node:
                    where[ref] = nodes[-1]  # the task runs again elsewhere
            waiting += [ref for ref in plan.lose(node, nodes[-1]) if ref not in waiting]
        elif what < 0.47 and where:
            ref = draw.choice(sorted(where))
            waiting += [gone for gone in plan.miss(ref, where[ref]) if gone not in waiting]
        else:
            machine.step(dead)
        if machine.result:
            break
    for _ in range(2000):
        if machine.result:
            break
        while waiting:
            ref = waiting.pop()
            plan.arrive(ref, where[ref])
        # Backups that died are found again, as the directory would find them.
        for ref in where:
            plan.arrive(ref, where[ref])
        machine.take()
        machine.step(dead)
    assert machine.result, "the reduction never ended"
    contributors, summed = machine.result
    assert contributors == summed, "result and contributors differ"
    assert len(set(contributors)) == len(contributors) == count


def test_a_loss_costs_only_the_path_to_the_root():
    plan = Plan(7, 99, BINARY)
    for i in range(7):
        plan.arrive(f"r{i}", i)
        plan.orders()
    before = {order.position: order.attempt for order in [position.told for position in plan._at.values()]}
    assert plan.lose(1, 99) == ["r1"]
    plan.arrive("r1", 50)
    after = {order.position: order.attempt for order in plan.orders()}
    assert set(after) == {1, 3, ROOT}
    assert all(after[position] != before[position] for position in after)


def test_an_absorbed_child_may_die():
    plan = Plan(3, 99, CHAIN)
    for i in range(3):
        plan.arrive(f"r{i}", i)
    by_position = {order.position: order for order in plan.orders()}
    plan.absorbed(0, by_position[0].attempt, by_position[1].attempt)
    assert plan.lose(0, 99) == []
    assert plan.orders() == []
    assert sorted(plan.lose(1, 99)) == ["r0", "r1"], "its parent died: what it had absorbed is needed again"


def test_spare_objects_are_backups():
    plan = Plan(2, 99, STAR)
    for i in range(3):
        plan.arrive(f"r{i}", i)
    plan.orders()
    assert plan.lose(0, 99) == ["r0"], "r2 takes its place; r0 may come back as a backup"
    plan.orders()
    assert sorted(plan.finish(plan.attempt)) == ["r1", "r2"]


def test_a_sum_of_an_old_attempt_is_refused():
    plan = Plan(1, 9, STAR)
    plan.arrive("r", 1)
    plan.orders()
    old = plan.attempt
    plan.lose(1, 9)
    plan.arrive("r", 2)
    plan.orders()
    assert plan.finish(old) is None
    assert plan.finish(plan.attempt) == ["r"]


def test_planning_is_quick_for_many_objects():
    """256 objects on 256 nodes, orders after each: a few milliseconds each."""
    for kind in (STAR, BINARY, CHAIN):
        plan = Plan(256, 999, kind)
        started = time.process_time()
        for i in range(256):
            plan.arrive(f"r{i}", i)
            plan.orders()
        plan.lose(100, 999)
        assert time.process_time() - started < 256 * 0.02
