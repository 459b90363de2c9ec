"""The fixtures `rig` (nodes in this process) and `rig_of` (of any kind): they end with the test."""

from __future__ import annotations

import machine
import pytest
from rig import Outside, Rig, Zygote

from hrdma.objects.store import Segment


@pytest.fixture(scope="session")
def zygote():
    Outside.zygote = Zygote()
    yield Outside.zygote
    Outside.zygote.close()


@pytest.fixture
def rig_of():
    made: list[Rig] = []
    machine.begin()

    def make(*arguments, **options) -> Rig:
        made.append(Rig(*arguments, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(rig_of):
    return rig_of()


VERBS = {"devices": "sim", "require": "verbs"}  # settings of nodes that have no other way


@pytest.fixture(params=["tcp", "verbs"])
def way(request):
    """Settings of nodes whose bytes go that way, and no other."""
    return VERBS if request.param == "verbs" else {"transport": "tcp"}


@pytest.fixture
def client(rig):
    rig.grow("a")
    return rig.client("a")


@pytest.fixture
def segment():
    made = Segment("s", {"kind": "bytes", "dtype": "uint8", "shape": [1 << 20], "nbytes": 1 << 20}, "g")
    yield made
    made.pins = 0
    made.close()
