"""Shards of the directory by themselves: what is answered when, what those hear who were away, when a sum counts."""

from __future__ import annotations

import struct

import pytest

from hrdma.objects.asker import Asker, keepers
from hrdma.objects.directory import Directory
from hrdma.objects.reduction import Reduction

META = {"kind": "bytes", "dtype": "uint8", "shape": [1 << 20], "nbytes": 1 << 20}


class Owner:
    """Records what a shard sends."""

    def __init__(self):
        self.sent = []

    def send(self, node, body):
        self.sent.append((node, body))

    def known(self, entry):
        pass

    def answers(self, node):
        found = [body for to, body in self.sent if to == node and body["verb"] == "answer"]
        self.sent.clear()
        return found


@pytest.fixture
def shard():
    owner = Owner()
    directory = Directory(owner, 1)
    directory.view(1, (1,))
    directory.synced(1)
    owner.sent.clear()
    return owner, directory


def test_a_shard_answers_when_it_can(shard):
    owner, directory = shard
    directory.heard(2, {"verb": "locate", "id": "x", "n": 1})
    assert owner.answers(2) == []
    directory.heard(3, {"verb": "put", "id": "x", "n": 5, "gen": "g", "meta": META})
    assert owner.sent[0] == (3, {"verb": "answer", "n": 5, "ok": True})
    assert owner.answers(2) == [{"verb": "answer", "n": 1, "meta": META, "gen": "g", "sender": 3}]
    directory.heard(2, {"verb": "have", "id": "x", "n": 2, "gen": "old"})
    assert owner.answers(2) == [{"verb": "answer", "n": 2, "stale": True}]
    with pytest.raises(ValueError, match="unknown verb"):
        directory.heard(2, {"verb": "entry", "id": "x", "n": 2})


def test_a_question_that_was_withdrawn_is_not_answered(shard):
    owner, directory = shard
    directory.heard(2, {"verb": "locate", "id": "x", "n": 1})
    directory.heard(2, {"verb": "forget", "id": "x", "question": 1})
    directory.heard(3, {"verb": "put", "id": "x", "n": 5, "gen": "g", "meta": META, "inline": b"\0"})
    assert owner.answers(2) == []


def test_after_a_change_of_view_nothing_is_answered_until_all_have_told():
    owner = Owner()
    directory = Directory(owner, 1)
    name = next(f"x{i}" for i in range(99) if keepers(f"x{i}", (1, 2))[0] == 1)
    directory.view(1, (1, 2))
    directory.heard(2, {"verb": "locate", "id": name, "n": 1})
    directory.synced(1)
    assert owner.answers(2) == []
    told = {"complete": True, "producing": False, "via": None, "gen": "g", "meta": META}
    directory.heard(1, {"verb": "copy", "id": name, **told})
    directory.synced(2)
    assert owner.answers(2)[0]["sender"] == 1


@pytest.fixture
def keeps():
    """A shard in a view of two nodes, of which this one, number 1, keeps "x"; the other has not told what it has."""
    owner = Owner()
    directory = Directory(owner, 1)
    name = next(f"x{i}" for i in range(99) if keepers(f"x{i}", (1, 2))[0] == 1)
    directory.view(1, (1,), 1)
    directory.synced(1)
    directory.heard(1, {"verb": "put", "id": name, "n": 1, "gen": "old", "meta": META})
    directory.heard(1, {"verb": "have", "id": name, "n": 2, "gen": "old"})
    directory.view(1, (), 0)
    directory.view(1, (1, 2), 3)
    owner.sent.clear()
    return owner, directory, name


TOLD = {"verb": "copy", "complete": True, "producing": False, "via": None, "gen": "old", "meta": META}
FACTS = dict.fromkeys(("meta", "owner", "spec", "parts", "error"))


@pytest.mark.parametrize("gen, deleted", [("", True), ("new", False)])
@pytest.mark.parametrize("first", ["copy", "facts"])
def test_who_was_away_is_told_that_its_copy_goes(keeps, gen, deleted, first):
    """Though it keeps the entry itself, and changed it as often as those who stayed."""
    owner, directory, name = keeps
    facts = {**FACTS, "version": (2 << 32) + 1, "gen": gen, "committed": not deleted, "deleted": deleted}
    messages = [(1, {**TOLD, "id": name}), (2, {"verb": "facts", "id": name, "facts": facts, "inline": None})]
    for src, body in messages if first == "copy" else messages[::-1]:
        directory.heard(src, body)
    directory.synced(1)
    directory.synced(2)
    assert owner.sent == [(1, {"verb": "purge", "id": name, "gen": "old"})]
    assert directory.entries[name].copies.of == {}


def test_what_was_decided_first_does_not_come_back(keeps):
    owner, directory, name = keeps
    directory.heard(1, {**TOLD, "id": name})
    facts = {**FACTS, "version": 99, "gen": "", "committed": False, "deleted": True}
    directory.heard(2, {"verb": "facts", "id": name, "facts": facts, "inline": None})
    directory.synced(1)
    directory.synced(2)
    assert owner.sent == [] and directory.entries[name].copies.complete == [1]


def test_of_what_was_deleted_a_backup_remembers_no_more_than_a_keeper(monkeypatch):
    from hrdma.objects import directory as module

    monkeypatch.setattr(module, "TOMBSTONES", 4)
    directory = Directory(Owner(), 1)
    directory.view(1, (1, 2))
    for i in range(9):
        facts = {**FACTS, "version": 1, "gen": "", "committed": False, "deleted": True}
        directory.heard(2, {"verb": "facts", "id": f"x{i}", "facts": facts, "inline": None})
    assert list(directory.entries) == ["x5", "x6", "x7", "x8"]


class Reducer(Owner):
    """A node that keeps a reduction, and has a backup."""

    latency, bandwidth = 1e-4, 1e7

    def __init__(self):
        super().__init__()
        self.asker = Asker(self.send)
        self.directory = Directory(self, 1)

    def later(self, _name, _seconds, call):
        call()

    def nodes(self):
        return (1, 2)

    def verbs(self):
        return [body["verb"] for _, body in self.sent]


@pytest.mark.parametrize("everywhere", (False, True))
def test_a_sum_counts_when_the_backup_knows_of_what(everywhere):
    """A keeper that was taken for lost does not know yet: what it says it is the sum of, another may sum up anew."""
    owner = Reducer()
    name = next(f"x{i}" for i in range(99) if keepers(f"x{i}", (1, 2))[0] == 1)
    owner.directory.view(1, (1, 2))
    for node in (1, 2):
        owner.directory.synced(node)
    entry = owner.directory._entry(name)
    entry.spec = {"refs": ["p", "q", "r"], "count": 3, "op": "sum", "node": 1, "everywhere": everywhere}
    meta = {"kind": "array", "dtype": "int64", "shape": [1 << 25], "nbytes": 1 << 28}
    making = entry.reducing = Reduction(entry, owner)
    for ref, node in (("p", 1), ("q", 2), ("r", 2)):
        making._arrived(ref, {"meta": meta, "node": node})
    plans = making._pieces.plans if everywhere else [making._plan]
    for piece, plan in enumerate(plans):
        making.heard(1, "summed", {"making": making.making, "attempt": plan.attempt, "piece": piece})
    if everywhere:
        owner.directory.heard(2, {"verb": "have", "id": name, "n": 7, "gen": entry.gen})
    assert sorted(entry.parts) == ["p", "q", "r"]
    asked = next(body for to, body in owner.sent if to == 2 and body.get("ack"))
    assert asked["facts"]["parts"] == entry.parts
    assert not {"counts", "unsum", "answer"}.intersection(owner.verbs())
    owner.directory.heard(2, {"verb": "acked", "id": name, "version": asked["facts"]["version"]})
    assert owner.verbs()[-3:] == ["unsum", "unsum", "answer"] if everywhere else ["counts", "unsum", "unsum"]


def test_a_sum_that_was_made_where_its_keeper_was_away_is_not_made_again():
    """What its backup began meanwhile ends: of two results one would be known to nobody, and stay when it is deleted."""
    owner = Reducer()
    name = next(f"x{i}" for i in range(99) if keepers(f"x{i}", (1, 2))[0] == 1)
    owner.directory.view(1, (1,), 2)
    owner.directory.synced(1)
    entry = owner.directory._entry(name)
    entry.spec = {"refs": ["p", "q"], "count": 2, "op": "sum", "node": 2, "everywhere": False}
    making = entry.reducing = Reduction(entry, owner)
    making._arrived("p", {"meta": META, "node": 1})
    owner.directory.view(1, (1, 2), 3)
    owner.sent.clear()
    facts = {**FACTS, "version": (1 << 32) + 3, "gen": "old", "committed": True, "deleted": False, "meta": META}
    facts |= {"spec": entry.spec, "parts": ["p", "q"]}
    owner.directory.heard(2, {"verb": "facts", "id": name, "facts": facts, "inline": None})
    owner.directory.heard(2, {**TOLD, "id": name})
    for node in (1, 2):
        owner.directory.synced(node)
    making._arrived("q", {"meta": META, "node": 2})  # which it had been waiting for
    assert "sum" not in owner.verbs()
    assert entry.reducing is None and entry.gen == "old" and entry.copies.complete == [2]
    owner.directory.heard(1, {"verb": "delete", "id": name, "n": 9})
    assert (2, {"verb": "purge", "id": name, "gen": "old"}) in owner.sent


@pytest.mark.parametrize("changed", (False, True), ids=["acknowledged", "another view"])
@pytest.mark.parametrize("count", (2, 3))
def test_a_small_sum_is_told_when_nobody_can_find_another(count, changed):
    """Of all that are named there is one sum, in one order; of the first that came the backup has to know which they were."""
    owner = Reducer()
    name = next(f"x{i}" for i in range(99) if keepers(f"x{i}", (1, 2))[0] == 1)
    owner.directory.view(1, (1, 2), 1)
    for node in (1, 2):
        owner.directory.synced(node)
    entry = owner.directory._entry(name)
    entry.spec = {"refs": ["p", "q", "r"], "count": count, "op": "sum", "node": 1, "everywhere": False}
    meta = {"kind": "array", "dtype": "float64", "shape": [1], "nbytes": 8}
    making = entry.reducing = Reduction(entry, owner)
    owner.directory.heard(2, {"verb": "locate", "id": name, "n": 7})
    for ref, value in (("r", -1e16), ("p", 1e16), ("q", 1.0))[:count]:
        making._arrived(ref, {"meta": meta, "inline": struct.pack("d", value)})
    owner.directory.heard(2, {"verb": "contributors", "id": name, "n": 8})
    asked = next(body for to, body in owner.sent if to == 2 and body.get("ack"))
    if count < 3:
        assert "answer" not in owner.verbs()
        if changed:
            owner.directory.view(1, (1, 2, 3), 2)
            owner.sent.clear()
            for node in (1, 2, 3):
                owner.directory.synced(node)
            owner.directory.heard(2, {"verb": "locate", "id": name, "n": 7})
            owner.directory.heard(2, {"verb": "contributors", "id": name, "n": 8})
        else:
            owner.directory.heard(2, {"verb": "acked", "id": name, "version": asked["facts"]["version"]})
    total, parts = owner.answers(2)
    assert struct.unpack("d", total["inline"])[0] == {3: (1e16 + 1.0) - 1e16, 2: 0.0}[count]
    assert parts["parts"] == ["p", "q", "r"] if count == 3 else parts["parts"] == ["p", "r"]
