"""Allreduce in pieces: every piece exactly once in each sum, and the links' loads."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hrdma.objects.pieces import Pieces, bounds, pieces_of
from hrdma.objects.shape import ROOT


def test_pieces_cover_the_bytes_once():
    for nbytes, number in ((1 << 20, 7), (8 * 1000, 3), (640, 16), (1, 2)):
        limits = bounds(nbytes, number)
        assert len(limits) == number and limits[0][0] == 0 and limits[-1][1] == nbytes
        assert all(before[1] == after[0] for before, after in pairwise(limits))
        assert all(start % 64 == 0 for start, end in limits if end > start)
    assert pieces_of(8, 32 << 20, 12e6) == 8
    assert pieces_of(8, 1 << 20, 12e6) == 1
    assert pieces_of(2, 1 << 30, 12e6) == 1


def run(pieces: Pieces, arrivals: dict[str, int], draw: random.Random) -> dict[int, list]:
    """Carries out orders on lists of names; what each piece's root has in the end."""
    waiting = list(arrivals)
    draw.shuffle(waiting)
    sums: dict[tuple[int, int], dict[int, dict]] = {}
    result: dict[int, list] = {}
    for _ in range(10_000):
        if waiting and draw.random() < 0.3:
            ref = waiting.pop()
            pieces.arrive(ref, arrivals[ref])
        for piece, order in pieces.orders():
            sum_ = sums.setdefault((piece, order.attempt), {"in": [], "has": list(order.refs)})
            sum_["order"] = order
        ready = [
            (piece, attempt, child)
            for (piece, attempt), sum_ in sums.items()
            for child in sum_["order"].children
            if child.attempt not in sum_["in"] and complete(sums.get((piece, child.attempt)))
        ]
        if ready:
            piece, attempt, child = draw.choice(ready)
            sums[piece, attempt]["in"].append(child.attempt)
            sums[piece, attempt]["has"] += sums[piece, child.attempt]["has"]
            pieces.absorbed(piece, child.position, child.attempt, attempt)
        for (piece, attempt), sum_ in sums.items():
            if sum_["order"].position == ROOT and complete(sum_):
                pieces.finish(piece, attempt)
                result[piece] = sorted(sum_["has"])
        if pieces.parts is not None:
            break
    return result


def complete(sum_: dict | None) -> bool:
    return sum_ is not None and sum_["order"].closed and len(sum_["in"]) == len(sum_["order"].children)


@pytest.mark.parametrize("seed", range(60))
def test_every_piece_is_the_sum_of_the_same_objects(seed):
    draw = random.Random(seed)
    hosts = draw.randint(1, 8)
    total = draw.randint(3, 12)
    count = draw.randint(3, total)
    pieces = Pieces(count, draw.randint(2, count))
    arrivals = {f"r{i}": draw.randrange(hosts) for i in range(total)}
    result = run(pieces, arrivals, draw)
    assert pieces.parts is not None, "it never ended"
    assert all(has == sorted(pieces.parts) for has in result.values())
    assert len(result) == len(pieces.plans) and len(set(pieces.parts)) == count
    assert all(sorted(pieces.ring(piece)) == sorted(pieces.nodes) for piece in result)
    assert all(pieces.ring(piece)[0] == plan.root for piece, plan in enumerate(pieces.plans))


def loads(pieces: Pieces, orders: list) -> tuple[list[int], list[int]]:
    """How many pieces each host sends and takes in, sums and results."""
    up, down = dict.fromkeys(pieces.nodes, 0), dict.fromkeys(pieces.nodes, 0)
    told = {(piece, order.position): order for piece, order in orders}
    ways = [(child.node, order.node) for order in told.values() for child in order.children]
    ways += [way for piece in range(len(pieces.plans)) for way in pairwise(pieces.ring(piece))]
    for sender, taker in ways:
        up[sender] += sender != taker
        down[taker] += sender != taker
    return list(up.values()), list(down.values())


@pytest.mark.parametrize("hosts", [3, 4, 8, 16])
def test_when_all_are_there_every_link_carries_the_same(hosts):
    pieces = Pieces(hosts, hosts)
    for host in range(hosts):
        pieces.arrive(f"r{host}", host)
    up, down = loads(pieces, pieces.orders())
    assert len(pieces.plans) == hosts
    assert set(up + down) == {2 * (hosts - 1)}


@pytest.mark.parametrize("hosts", [3, 4, 8, 16])
@pytest.mark.parametrize("done", [0, 3, 99])
def test_who_comes_last_has_no_more_to_do_than_others(hosts, done):
    """However many sums have passed on at each arrival before: the links are loaded alike with what is left."""
    pieces = Pieces(hosts, hosts)
    passed: set[tuple[int, int, int]] = set()
    orders: list = []
    for host in range(hosts - 1):
        pieces.arrive(f"r{host}", host)
        orders += pieces.orders()
        for _ in range(done):
            todo = [
                (piece, child.position, child.attempt, order.attempt)
                for piece, order in orders
                for child in order.children
                if (piece, child.position, child.attempt) not in passed
            ]
            for each in todo[:1]:
                passed.add(each[:3])
                pieces.absorbed(*each)
                orders += pieces.orders()
    pieces.arrive(f"r{hosts - 1}", hosts - 1)
    orders = pieces.orders()
    assert len(pieces.plans) == 2 * hosts
    up, down = loads(pieces, [(piece, order) for piece, order in orders if order.children])
    assert max(up[-1], down[-1]) <= sum(up) / hosts + 3
    assert max(up + down) <= sum(up) / hosts + 3
