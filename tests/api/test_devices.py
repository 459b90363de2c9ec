"""HRDMA_DEVICES and HRDMA_VERBS: which device a job takes, what is refused, queue pairs that fail by plan; on device ``sim``."""

from __future__ import annotations

import mmap
import os
import re
import resource

import numpy as np
import pytest

import harness
import hrdma
import hrdma.verbs
from hrdma import _core

SIM = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": "sim"}


def what_is_taken(comm):
    comm.barrier()
    found = comm.info()
    return [sorted(set(found["transports"].values()) - {"loop"}), found["domains"].get("verbs", "")]


@pytest.mark.parametrize(
    ("env", "transport"),
    [
        (SIM, "verbs"),
        ({"HRDMA_DEVICES": "sim", "HRDMA_REQUIRE": "verbs", "HRDMA_TRANSPORT": "verbs,tcp"}, "verbs"),
        ({"HRDMA_DEVICES": "no_such_*,sim", "HRDMA_TRANSPORT": "verbs"}, "verbs"),
        ({"HRDMA_DEVICES": "sim"}, "shm"),  # the better one for this host
        ({}, "shm"),
    ],
)
def test_the_simulated_device_is_taken_when_it_is_named(env, transport):
    for names, text in harness.ranks(what_is_taken, 2, env=env):
        assert names == [transport]
        assert text.startswith("sim, named: port 1 GID 0 fd") == ("HRDMA_DEVICES" in env)


def reduced_where_it_lies(comm):
    found = {}
    for name, given, out in (("in place", None, None), ("out of place", 1, 2), ("plain array", np, None)):
        x = np.empty(300_000, "float32") if given is np else hrdma.empty(300_000, "float32")
        y = hrdma.empty(300_000, "float32") if out else x
        for turn in range(2):
            x[:] = np.arange(x.size) + comm.rank
            before = comm.stats()["counters"]
            comm.allreduce(x, **({"out": y} if out else {}))
            after = comm.stats()["counters"]
            assert (y == np.arange(x.size) * 2 + 1).all(), (name, turn)
        found[name] = [after[what] - before[what] for what in ("transfers_pushed", "transfers_segments")]
    return found


def test_what_is_reduced_is_written_by_the_device_and_not_copied_along():
    for found in harness.ranks(reduced_where_it_lies, 2, env=SIM):
        for name, (pushed, segments) in found.items():
            assert pushed >= 2 and segments == 0, (name, found)


LARGE = 1 << 30
PINNED = 64 << 20
TEXT = r"; (\d+) registrations, at most ([\d.]+) MB pinned outside arenas$"


def counted(comm):
    """What the domain's text counts: registrations, and the most bytes that were pinned at a time."""
    found = re.search(TEXT, comm.info()["domains"]["verbs"])
    return int(found[1]), float(found[2]) * 1e6


def large_and_plain(comm):
    """An array that nobody registered goes through buffers; those of the sender are its zero page but for some marks."""
    pages = mmap.mmap(-1, LARGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    x, marks = np.frombuffer(pages, "uint8"), slice(0, None, (1 << 20) + 1)
    if comm.rank == 0:
        x[marks] = np.arange(len(x[marks])) % 251
        comm.send(x, 1, timeout=60)
    else:
        comm.recv(x, 0, timeout=60)
        assert (x[marks] == np.arange(len(x[marks])) % 251).all()
        x[marks] = 0
        assert not any(part.any() for part in np.split(x, 64))
    return counted(comm)


@pytest.mark.timeout(100)
def test_an_array_of_more_than_may_be_pinned_goes_through_buffers():
    for _, most in harness.ranks(large_and_plain, 2, env=SIM, timeout=90):
        assert 0 < most <= PINNED, most


def repeated(comm, plain, slices):
    """The same on the same array, or on other parts of it."""
    x = np.zeros((4, 1 << 18)) if plain else hrdma.zeros((4, 1 << 18))
    y = np.zeros(1 << 18) if plain else hrdma.zeros(1 << 18)
    found = []
    for turn in range(4):
        comm.allreduce(x[turn] if slices else x[0])
        comm.sendrecv(x[turn].reshape(512, -1), 1 - comm.rank, y, 1 - comm.rank)
        found.append(counted(comm))
    return found


@pytest.mark.parametrize("slices", [False, True], ids=["", "parts"])
@pytest.mark.parametrize("plain", [False, True], ids=["hrdma", "numpy"])
@pytest.mark.parametrize("devices", ["sim", "sim2,sim2"])
def test_a_second_operation_on_an_array_does_not_register_it_again(devices, plain, slices):
    env = SIM | {"HRDMA_DEVICES": devices}
    for found in harness.ranks(repeated, 2, env=env, plain=plain, slices=slices):
        registered = [count for count, _ in found]
        assert registered[0] > 0 and len(set(registered)) == 1, found
        if plain:
            assert all((10 << 20) < most < (12 << 20) for _, most in found), found  # both, once


def come_and_go(comm):
    """Arrays that end give back what they had pinned; one that is used at the same address is another."""
    found = []
    for turn in range(20):
        x = np.full(1 << 20, comm.rank + turn, "float64")  # 8 MiB, mostly where the one before was
        comm.allreduce(x)
        assert (x == 2 * turn + 1).all()
        y = np.empty_like(x)
        comm.sendrecv(x, 1 - comm.rank, y, 1 - comm.rank)
        assert (y == x).all()
        del x, y
        found.append(counted(comm))
    kept = [np.full(1 << 20, turn, "float64") for turn in range(12)]  # more than may be pinned at a time
    for _ in range(2):
        for turn, x in enumerate(kept):
            comm.allreduce(x, op="max")
            assert (x == turn).all()
    x = np.zeros(1 << 20)
    comm.allreduce(x)
    with pytest.raises(ValueError, match="resize"):
        x.resize(1 << 21, refcheck=False)  # its memory is known to the device
    return [*found, counted(comm)]


@pytest.mark.parametrize("devices", ["sim", "sim2,sim2"])
def test_arrays_that_end_are_pinned_no_more(devices):
    env = SIM | {"HRDMA_DEVICES": devices}
    for found in harness.ranks(come_and_go, 2, env=env):
        *_, last, kept = found  # of 320 MiB
        assert last[1] < 40e6 and kept[1] <= PINNED + (4 << 20), found


def forks(comm):
    """A child frees its copy of an array: that is no matter of the parent's device."""
    x = np.full(1 << 18, comm.rank, "int64")
    comm.allreduce(x)
    child = os.fork()
    if child == 0:
        del x
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    x += 1
    comm.allreduce(x)
    return bool((x == 4).all())


def test_a_child_that_ends_takes_no_registration_with_it():
    assert harness.ranks(forks, 2, env=SIM) == [True, True]


def through_failures(comm):
    """Sums stay right while queue pairs of the first rail fail; until one was used again."""
    x = np.empty(150_000, "int64")
    for i in range(100_000):
        x[:] = np.arange(x.size) * 2 + comm.rank + i
        comm.allreduce(x, timeout=20)
        assert (x == np.arange(x.size) * 4 + 1 + 2 * i).all(), i
        comm.sendrecv(x[:500], (comm.rank + 1) % 2, x[500:1000], (comm.rank + 1) % 2, timeout=20)
        assert (x[500:1000] == x[:500]).all()
        text = comm.info()["domains"]["verbs"]
        found = re.match(r"2 rails \((\d+) times lost, (\d+) used again\): sim2", text)
        back = np.array([int(found[2]) if found else 0])
        comm.allreduce(back, op="min", timeout=20)
        if back[0] >= 1:
            return int(found[1])
    raise AssertionError(text)


def test_a_rail_that_fails_is_taken_over_and_used_again():
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": "sim2,sim2", "HRDMA_VERBS": "wc_error=0.005"}
    assert min(harness.ranks(through_failures, 2, env=env, timeout=60)) >= 1


def opened(rank):
    hrdma.init(timeout=5).barrier()


@pytest.mark.parametrize(
    ("env", "error", "text"),
    [
        ({"HRDMA_DEVICES": "carrier_pigeon"}, "DeviceError", "carrier_pigeon|libibverbs"),
        ({"HRDMA_DEVICES": "sim:2"}, "DeviceError", "sim has no port 2: it has 1"),
        ({"HRDMA_DEVICES": "sim,no_device"}, "DeviceError", "no RDMA device is called no_device|libibverbs"),
        ({"HRDMA_DEVICES": "sim,sim:9"}, "DeviceError", "sim has no port 9: it has 1"),
        ({"HRDMA_DEVICES": "sim:1x"}, "ValueError", "HRDMA_DEVICES: sim:1x names no port: '1x'"),
        (
            SIM | {"HRDMA_VERBS": "colour=red"},
            "ValueError",
            "verbs has no option 'colour'; it has gid, pin, ack_timeout, fallback",
        ),
        (SIM | {"HRDMA_VERBS": "wc_error=2"}, "ValueError", "wc_error=2"),
        (SIM | {"HRDMA_VERBS": "gid=7"}, "ValueError", "gid=7: sim has no such GID; it has 1 entries"),
    ],
)
def test_what_cannot_be_had_is_named(env, error, text):
    (one,) = harness.outcomes(opened, 1, init=False, env=env, timeout=20)
    assert one.error == error
    assert any(word in one.text for word in text.split("|")), one.text


@pytest.mark.skipif(set(hrdma.verbs.devices()) != {"sim"}, reason="this machine has an RDMA device")
def test_who_requires_verbs_and_names_no_device_is_told_that_there_is_none():
    (one,) = harness.outcomes(opened, 1, init=False, env={"HRDMA_REQUIRE": "verbs"}, timeout=20)
    assert one.error == "DeviceError"
    assert "there is no RDMA device here: `hrdma rxe up` makes one" in one.text or "libibverbs" in one.text, one.text
    assert "called" not in one.text, one.text


def pinned_by_bytes(comm):
    end = hrdma.Endpoint(comm, 1 - comm.rank)
    kept = end.expose(bytearray(3000))
    with pytest.raises(hrdma.RequestError) as found:
        end.expose(bytearray(1001))
    end.expose(hrdma.zeros(100_000)).close()
    kept.close()
    end.expose(bytearray(1001)).close()
    comm.barrier()
    return str(found.value)


@pytest.mark.parametrize("more", [{}, {"HRDMA_DEVICES": "sim2,sim2"}])
def test_memory_beyond_what_may_be_pinned_is_refused_with_that_limit(more):
    found = harness.ranks(pinned_by_bytes, 2, env=SIM | {"HRDMA_VERBS": "pin=4000"} | more)
    for rank, text in enumerate(found):
        assert text == (
            f"1001 bytes cannot be registered for rank {1 - rank}: HRDMA_VERBS=pin=4000 is what may be pinned outside "
            "arenas, and 3000 bytes of it are taken; take them from hrdma.empty()"
        )


def pinned_by_chance(comm, limit):
    """The device refuses now and then, as it would beyond the memlock limit."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
    end, kept = hrdma.Endpoint(comm, 1 - comm.rank), []
    with pytest.raises(hrdma.RequestError) as found:
        for _ in range(5000):
            kept.append(end.expose(bytearray(77)))
    comm.barrier()
    return str(found.value)


def test_memory_that_cannot_be_pinned_is_refused_with_the_memlock_limit():
    env = SIM | {"HRDMA_VERBS": "reg_errno=0.01"}
    for rank, text in enumerate(harness.ranks(pinned_by_chance, 2, env=env, limit=65537)):
        assert text == (
            f"77 bytes cannot be registered for rank {1 - rank}: 77 bytes cannot be pinned: Cannot allocate memory (the "
            "device has 16384 regions); the memlock limit is 65537 bytes, raise it: ulimit -l unlimited; take them from "
            "hrdma.empty()"
        )


def warned(rank):
    """What is said of the devices, and the text of those that are used."""
    said = []
    hrdma.log.logger.warning = lambda text, *args: said.append(text % args)
    with hrdma.init(timeout=20) as comm:
        comm.barrier()
        text = comm.info()["domains"]["verbs"]
        comm.barrier()  # who ends is a rail lost
    return said, text


def test_a_named_device_that_will_not_do_is_said_in_one_line():
    env = {"HRDMA_TRANSPORT": "verbs", "HRDMA_DEVICES": "sim, sim2", "HRDMA_VERBS": "gid=2"}
    for said, text in harness.ranks(warned, 2, init=False, env=env):
        assert said == ["sim is not used: verbs option gid=2: sim has no such GID; it has 1 entries"]
        assert text.startswith("1 rail: sim2, named")


def logged(rank):
    """The line at level info that says which rails are used."""
    said = []
    hrdma.log.logger.info = lambda text, *args: said.append(text % args)
    with hrdma.init(timeout=20) as comm:
        comm.allreduce(hrdma.zeros(1 << 18))
        (line,) = [text for text in said if text.startswith("verbs: ")]
        text = comm.info()["domains"]["verbs"]
        comm.barrier()
    return line, text


@pytest.mark.parametrize("rails", [2, 3])
def test_what_was_chosen_is_said_whole(rails):
    env = SIM | {"HRDMA_DEVICES": ",".join(["sim2"] * rails), "HRDMA_LOG_LEVEL": "info"}
    one = r"sim2, named: port 1 GID 1 ::ffff:[\d.]+ \(IPv4, MTU 4096\), of 6; .*; called at 127\.0\.0\.1:\d+"
    one += r"; \d+ registrations, at most [\d.]+ MB pinned outside arenas"
    for texts in harness.ranks(logged, 2, init=False, env=env):
        for text in texts:
            found = re.fullmatch(rf"(?:verbs: )?{rails} rails: (.*)", text)
            parts = found[1].split("; sim2, ")
            parts[1:] = [f"sim2, {part}" for part in parts[1:]]
            assert len(parts) == rails and all(re.fullmatch(one, part) for part in parts), text


def test_what_is_chosen_by_hand_keeps_its_number():
    said = []
    found = hrdma.verbs.choose("sim,sim2", gid_index=2, warn=said.append)
    assert found == [None, ("sim2", 1, 2)] and "sim is not used" in said[0]
    assert hrdma.verbs.choose("sim, sim2:2") == [("sim", 1, 0), ("sim2", 2, 1)]
    with pytest.raises(hrdma.DeviceError, match=r"no_device|libibverbs"):
        hrdma.verbs.choose("sim,no_device")
    with pytest.raises(ValueError, match="sim:x names no port"):
        hrdma.verbs.choose("sim:x")


def without_a_device(rank):
    """The library says that there is an RDMA device, and opening it finds none that will do."""
    found = _core.provider_devices
    _core.provider_devices = lambda name: (1, "") if name == "verbs" else found(name)
    comm = hrdma.init(timeout=20)
    comm.barrier()
    return sorted(comm.info()["domains"])


@pytest.mark.skipif(_core.provider_devices("verbs")[0], reason="this host has an RDMA device, which would be opened")
def test_verbs_that_nobody_asked_for_is_left_out_where_no_device_will_do():
    assert harness.ranks(without_a_device, 2, init=False) == [["loop", "shm", "tcp"]] * 2
    (one,) = harness.outcomes(without_a_device, 1, init=False, env={"HRDMA_REQUIRE": "verbs"}, timeout=20)
    assert one.error == "DeviceError", one.text


def fails_by_plan(rank, plan):
    """A queue pair of rank 0 gets an error instead of a completion; whoever loses whom, they part and say so."""
    if rank == 0:
        os.environ["HRDMA_VERBS"] = plan
    comm = hrdma.init(timeout=20)
    x = np.ones(1000)
    try:
        for _ in range(5000):
            comm.allreduce(x, op="max", timeout=20)
    except hrdma.PeerError as error:
        return error.transport, str(error)
    return "", "nothing happened"


@pytest.mark.parametrize(
    ("status", "words"),
    [("retry", "transport retries exceeded"), ("rnr", "receiver-not-ready"), ("access", "remote access error")],
)
def test_a_queue_pair_that_fails_by_plan_is_a_peer_error_with_its_status(status, words):
    plan = f"wc_error=0.02,wc_status={status},fault_budget=1"
    found = harness.ranks(fails_by_plan, 2, init=False, env=SIM, plan=plan)
    assert [transport for transport, _ in found] == ["verbs"] * 2, found
    assert words in found[0][1] and "vendor code 0xfa" in found[0][1], found


def fails_to_connect(rank, options):
    if rank == 0:
        os.environ["HRDMA_VERBS"] = options
    hrdma.init(timeout=20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("narrow=16", "packets of 4096 bytes do not get there, small ones do: ip link set DEVICE mtu ..."),
        ("deaf=16", "retries exceeded; TCP gets there, is UDP port 4791 open?"),
    ],
)
def test_both_ends_say_why_no_pair_of_gids_works(options, words):
    env = SIM | {"HRDMA_DEVICES": "sim2"}
    found = harness.outcomes(fails_to_connect, 2, init=False, env=env, timeout=60, options=options)
    for one in found:
        assert one.error == "PeerError" and words in one.text and "the last of 12 pairs" in one.text, one.text
