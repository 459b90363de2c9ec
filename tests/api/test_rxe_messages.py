"""hrdma.rxe without a kernel that has RDMA: golden bytes of the messages, answers of a made-up kernel, errors."""

from __future__ import annotations

import errno
import socket
import struct

import pytest
from click.testing import CliRunner

from hrdma import rxe
from hrdma.cli.rxe import command
from hrdma.errors import DeviceError, NetlinkError, RefusedError
from hrdma.qos.wire import Wire, attribute, attributes, framed


@pytest.mark.parametrize(
    ("request_", "golden"),
    [
        (rxe.query(), "10000000 0114 0103 0000000000000000"),
        (rxe.port(3), "20000000 0514 0100 0000000000000000 0800 0100 03000000 0800 0300 01000000"),
        (rxe.remove(3), "18000000 0414 0500 0000000000000000 0800 0100 03000000"),
        (
            rxe.add("eth0"),
            "34000000 0314 0500 0000000000000000"  # as `rdma link add hrdma_eth0 type rxe netdev eth0` has it
            "0f00 0200 6872646d615f6574683000 00"
            "0800 4100 72786500"
            "0900 3300 6574683000 000000",
        ),
    ],
    ids=["query", "port", "remove", "add"],
)
def test_golden_bytes(request_, golden):
    assert framed(*request_).hex() == golden.replace(" ", "")


def number(attrs: dict[int, bytes]) -> int:
    """Of the device that a request is about."""
    return struct.unpack("=I", attrs[rxe.DEV_INDEX])[0]


class Kernel(Wire):
    """Devices by index, and what netlink does with them; stands for a socket."""

    def __init__(self) -> None:
        self.devices = {4: ("rxe0", "wire0"), 7: ("mlx5_0", "")}
        self.refuses: int | None = None
        self.raced = False  # what is asked for, somebody else has done a moment before
        self.next = 9

    def __call__(self, protocol: int = socket.NETLINK_ROUTE) -> Kernel:
        assert protocol in (rxe.NETLINK_RDMA, socket.NETLINK_ROUTE)
        return self

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ifindex(self, name: str) -> int:
        if name == "nope":
            raise DeviceError("no device 'nope' in this network namespace")
        return 1

    def send(self, body: bytes, kind: int, flags: int) -> list[tuple[int, bytes]]:
        attrs = attributes(body)
        if kind == rxe.GET:
            return [(kind, self.device(index)) for index in self.devices]
        if kind == rxe.PORT_GET:
            return [(kind, self.device(number(attrs)))]
        if self.refuses and not self.raced:
            raise OSError(self.refuses, "refused", "in its own words")
        if kind == rxe.NEWLINK:
            self.devices[self.next] = (rxe._text(attrs[rxe.DEV_NAME]), rxe._text(attrs[rxe.NDEV_NAME]))
            self.next += 1
        else:
            del self.devices[number(attrs)]
        if self.refuses:
            raise OSError(self.refuses, "refused")
        return []

    def device(self, index: int) -> bytes:
        name, netdev = self.devices[index]
        body = attribute(rxe.DEV_INDEX, struct.pack("=I", index)) + attribute(rxe.DEV_NAME, name.encode() + b"\0")
        body += attribute(rxe.PORT_STATE, b"\4") + (
            attribute(rxe.NDEV_NAME, netdev.encode() + b"\0") if netdev else b""
        )
        return bytes(16) + body


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    monkeypatch.setattr(rxe, "Wire", made)
    return made


def test_up_and_down_change_only_what_is_ours_and_can_be_repeated(kernel):
    before = dict(kernel.devices)
    assert [(link.name, link.netdev, link.state, link.ours) for link in rxe.links()] == [
        ("rxe0", "wire0", "active", False),
        ("mlx5_0", "", "active", False),
    ]
    made = rxe.up("eth0")
    assert (made.name, made.netdev, made.ours) == ("hrdma_eth0", "eth0", True)
    assert rxe.up("eth0") == made and len(kernel.devices) == 3
    assert rxe.down("eth1") == [] and rxe.down() == [made] and rxe.down() == []
    assert kernel.devices == before


def test_a_card_that_has_one_of_others_is_refused(kernel):
    with pytest.raises(DeviceError, match=r"wire0 has rxe0, which others made: HRDMA_DEVICES=rxe0"):
        rxe.up("wire0")
    kernel.devices[8] = ("hrdma_eth9", "eth3")  # named like ours, on a card that it does not name
    assert rxe.down() == []


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (errno.EPERM, RefusedError, "root"),
        (errno.EINVAL, DeviceError, "modprobe rdma_rxe"),
        (errno.EEXIST, NetlinkError, "in its own words"),
    ],
)
def test_what_the_kernel_refuses(kernel, monkeypatch, number, error, words):
    kernel.refuses = number
    monkeypatch.setattr(rxe, "has_net_admin", lambda: False)
    with pytest.raises(error, match=words):
        rxe.up("eth0")
    done = CliRunner().invoke(command, ["up", "--dev", "eth0"])
    assert done.exit_code == (126 if error is RefusedError else 1)
    with pytest.raises(DeviceError, match="nope"):
        rxe.up("nope")


def test_root_is_not_told_to_be_root(kernel, monkeypatch):
    kernel.refuses = errno.EPERM
    monkeypatch.setattr(rxe, "has_net_admin", lambda: True)
    with pytest.raises(DeviceError, match=r"eth0\.100 is a VLAN"):
        rxe.up("eth0.100")


def test_what_somebody_else_did_at_the_same_time_is_done(kernel):
    kernel.raced, kernel.refuses = True, errno.EEXIST
    made = rxe.up("eth0")
    assert made.ours and made.netdev == "eth0"
    kernel.refuses = errno.EINVAL
    assert rxe.down() == [made] and not any(link.ours for link in rxe.links())
    kernel.raced = False
    kernel.devices[9] = ("hrdma_eth0", "eth0")
    with pytest.raises(NetlinkError, match="remove hrdma_eth0"):
        rxe.down()


def test_descriptors_that_ran_out_are_no_missing_module(monkeypatch):
    def exhausted(protocol):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(rxe, "Wire", exhausted)
    with pytest.raises(OSError, match="Too many open files"):
        rxe.up("eth0")


def test_where_the_kernel_has_no_rdma(monkeypatch):
    def refuse(protocol):
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    monkeypatch.setattr(rxe, "Wire", refuse)
    assert rxe.links() == [] and rxe.down() == []
    with pytest.raises(DeviceError, match="modprobe rdma_rxe"):
        rxe.up("eth0")
