"""RDMA on this host: the kernel's part, the library's, every device, port and GID, and an exchange over each."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hrdma import verbs
from hrdma.config import Config
from hrdma.doctor import exchange
from hrdma.doctor.finding import ERROR, OK, WARNING, Finding
from hrdma.doctor.host import read
from hrdma.errors import DeviceError
from hrdma.units import in_bytes, in_seconds

__all__ = ["active", "chosen", "examine", "kernel", "library", "measured", "port"]

BEST_MTU = 4096
APT = "apt install ibverbs-providers"


def examine(root: Path) -> Iterator[Finding]:
    """Everything in this file. Takes about a second for each device."""
    yield from kernel(root, os.uname().release)
    devices = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    driven, found = library(bool(devices))
    yield found
    for name in devices:
        folder = root / "sys/class/infiniband" / name
        yield from _access(root, name)
        if found.level == OK and name not in driven:
            yield Finding(ERROR, name, "no provider library on this host drives it", APT)
        for place in sorted((folder / "ports").glob("*"), key=lambda path: int(path.name)):
            yield from port(root, name, int(place.name))
            if name in driven and read(place / "state").endswith("ACTIVE"):
                yield from _usable(root, name, int(place.name))
                yield _exchanged(name, int(place.name))
    yield from chosen()
    yield _exchanged("sim", 1)


def active(root: Path) -> list[tuple[str, int]]:
    """Devices and ports that can be used now, as the kernel and the library have them; not the simulated one."""
    driven, _ = library(False)
    folder = root / "sys/class/infiniband"
    return [
        (name, int(place.name))
        for name in driven
        for place in sorted((folder / name / "ports").glob("*"), key=lambda path: int(path.name))
        if read(place / "state").endswith("ACTIVE")
    ]


def kernel(root: Path, release: str) -> Iterator[Finding]:
    """Modules: what is loaded, what could be."""
    there = read(root / "lib/modules" / release / "modules.dep") + read(
        root / "lib/modules" / release / "modules.builtin"
    )
    loaded = [name for name in ("ib_core", "ib_uverbs", "rdma_rxe") if (root / "sys/module" / name).exists()]
    devices = any((root / "sys/class/infiniband").glob("*"))
    if devices and not (root / "sys/class/infiniband_verbs").exists():
        yield Finding(ERROR, "kernel", "there are RDMA devices, and programs cannot open them", "modprobe ib_uverbs")
    elif devices:
        yield Finding(OK, "kernel", f"RDMA devices; modules {' '.join(loaded) or 'built in'}")
    elif "rdma_rxe" in loaded or "/rdma_rxe.ko" in there:
        text = "no RDMA device: hosts are joined by tcp. Soft-RoCE makes one of any network card, to try"
        yield Finding(WARNING, "kernel", text, "sudo hrdma rxe up")
    else:
        text = f"no RDMA device, and kernel {release} has no soft-RoCE (rdma_rxe): hosts are joined by tcp"
        yield Finding(WARNING, "kernel", text, "HRDMA_DEVICES=sim tries provider verbs without a device")


def library(needed: bool) -> tuple[list[str], Finding]:
    """The devices that libibverbs drives, and whether it can be used: an error where there are devices that need it."""
    if why := verbs.library():
        if needed:
            return [], Finding(ERROR, "libibverbs", f"{why}; there are devices that need it", APT)
        return [], Finding(OK, "libibverbs", f"{why}; only RDMA devices need it")
    try:
        return verbs.devices(), Finding(OK, "libibverbs", "installed")
    except DeviceError as error:
        return [], Finding(ERROR, "libibverbs", str(error), "dmesg; in containers --device /dev/infiniband")


def _access(root: Path, name: str) -> Iterator[Finding]:
    for folder in (root / "sys/class/infiniband_verbs").glob("uverbs*"):
        node = root / "dev/infiniband" / folder.name
        if read(folder / "ibdev") == name and not os.access(node, os.R_OK | os.W_OK):
            mend = f"chmod 666 /dev/infiniband/{folder.name}; in containers --device /dev/infiniband"
            yield Finding(ERROR, name, f"/dev/infiniband/{folder.name} cannot be opened by this user", mend)


def port(root: Path, name: str, number: int) -> Iterator[Finding]:
    """State, GIDs and losslessness of one port, as the kernel shows them."""
    device = root / "sys/class/infiniband" / name
    folder = device / "ports" / str(number)
    where = f"{name}:{number}"
    netdev = _netdev(folder)
    state, layer = read(folder / "state").partition(" ")[2], read(folder / "link_layer")
    details = [layer, read(folder / "rate"), f"on {netdev}" if netdev else ""]
    numa = read(device / "device/numa_node")
    details += [f"NUMA node {numa}"] if numa.isdecimal() else []
    text = f"{state.lower() or 'unknown state'}; {', '.join(filter(None, details))}"
    if state == "ACTIVE":
        yield Finding(OK, where, text)
    else:
        cable = f"ip link set {netdev} up" if netdev else "check cable and switch, and on InfiniBand the subnet manager"
        yield Finding(WARNING, where, text, cable)
    if layer == "Ethernet":
        yield _gids(folder, where, netdev)
        if state == "ACTIVE" and netdev and (device / "device").exists() and not (device / "parent").exists():
            yield _lossless(where, netdev)


def _netdev(folder: Path) -> str:
    """The network device under a port; empty on InfiniBand."""
    return next((text for path in (folder / "gid_attrs/ndevs").glob("*") if (text := read(path))), "")


def _gids(folder: Path, where: str, netdev: str) -> Finding:
    """Which GIDs there are. Rank: IPv4-mapped, global IPv6, link-local; RoCE v2 alone crosses routers."""
    found = []
    for path in sorted((folder / "gids").glob("*"), key=lambda path: int(path.name)):
        text = read(path)
        if text and int(text.replace(":", ""), 16):
            address = ipaddress.IPv6Address(text)
            found.append((int(path.name), address, read(folder / "gid_attrs/types" / path.name)))
    shown = ", ".join(f"{index}: {address.ipv4_mapped or address} {kind}" for index, address, kind in found)
    mend = f"ip address add 10.0.0.1/24 dev {netdev or '...'} (an address of your network)"
    if not found:
        return Finding(ERROR, f"{where} GIDs", "none: nothing can be connected", mend)
    if not any(kind == "RoCE v2" and not address.is_link_local for _, address, kind in found):
        return Finding(WARNING, f"{where} GIDs", f"none of an address that crosses networks ({shown})", mend)
    return Finding(OK, f"{where} GIDs", shown)


def _lossless(where: str, netdev: str) -> Finding:
    """Priority flow control and trust, by the kernel's dcbnl."""
    from hrdma.qos import dcb
    from hrdma.qos.wire import Wire

    try:
        with Wire() as wire:
            state = dcb.read(wire, netdev)
    except OSError as error:
        return Finding(WARNING, f"{where} PFC", f"the kernel does not say: {error}", f"dcb pfc show dev {netdev}")
    if state is None:
        return Finding(OK, f"{where} PFC", f"{netdev} does not show its priorities")
    trust = "not shown" if state.trust is None else "DSCP" if state.trust == dcb.DSCP_ONLY else "not DSCP"
    on = [str(priority) for priority in range(8) if state.lossless >> priority & 1]
    if not on:
        text = f"no priority of {netdev} is lossless: full switches drop packets, which RDMA repays with retries"
        return Finding(WARNING, f"{where} PFC", f"{text}; trust: {trust}", f"dcb pfc set dev {netdev} prio-pfc 3:on")
    mend = f"dcb apptrust set dev {netdev} order dscp" if trust == "not DSCP" else ""
    text = f"lossless priorities {' '.join(on)}; trust: {trust}"
    return Finding(WARNING if mend else OK, f"{where} PFC", text, mend)


def _usable(root: Path, name: str, number: int) -> Iterator[Finding]:
    """MTU of an active port, and which of its GIDs a communicator would take."""
    where = f"{name}:{number}"
    try:
        with verbs.Device(name, number) as device:
            mtu = device.mtu
    except RuntimeError as error:
        yield Finding(ERROR, f"{where} MTU", str(error))
        return
    netdev = _netdev(root / "sys/class/infiniband" / name / "ports" / str(number))
    if mtu < BEST_MTU and netdev:
        text = f"{mtu} bytes, since {netdev} has {read(root / 'sys/class/net' / netdev / 'mtu')}"
        yield Finding(WARNING, f"{where} MTU", text, f"ip link set {netdev} mtu 4200 (its switch must carry that)")
    else:
        yield Finding(OK, f"{where} MTU", f"{mtu} bytes")
    try:
        config = Config.load()
        one = verbs.found(where, ifname=config.ifname, gid_index=config.gid())[0]
    except (DeviceError, ValueError) as error:
        yield Finding(
            WARNING, f"{where} GID", f"none is chosen: {error}", "HRDMA_IFNAME or HRDMA_VERBS=gid= excludes it"
        )
        return
    if one:
        yield Finding(OK, f"{where} GID", _choice(one), figures={"gid": one.paths[0].gid_index})


def chosen() -> Iterator[Finding]:
    """The devices that a communicator would use by the settings of this environment, and why these and these GIDs."""
    said: list[str] = []
    config = None
    try:
        config = Config.load()
        names = config.hardware()
        found = verbs.found(names, ifname=config.ifname, gid_index=config.gid(), warn=said.append)
    except (DeviceError, ValueError) as error:
        if config is None or config.devices or isinstance(error, ValueError):
            yield Finding(ERROR, "rails", str(error), "hrdma info lists the settings; `rdma link` the devices")
        return
    for text in said:
        yield Finding(WARNING, "rails", text)
    for number, one in enumerate(found):
        if one:
            distance = f"{one.reason}{'' if 'NUMA' in one.reason else f', NUMA distance {one.distance}'}"
            text = f"{one.name}, {distance}, MTU {one.paths[0].mtu}; port {one.paths[0].port}: {_choice(one)}"
            figures = {"port": one.paths[0].port, "gid": one.paths[0].gid_index, "distance": one.distance}
            yield Finding(OK, f"rail {number}", text, figures=figures)


def _choice(one: verbs.Found) -> str:
    """Which GID, why, and what else there is, best first."""
    first, *rest = one.paths
    text = f"GID {first.gid_index} ({_gid(first)}) is chosen: {one.why}"
    shown = ", ".join(f"port {path.port} GID {path.gid_index} ({_gid(path)}, MTU {path.mtu})" for path in rest)
    return f"{text}; candidates behind it: {shown}" if shown else text


def _gid(path: verbs.Path) -> str:
    address = ipaddress.IPv6Address(path.gid)
    return f"{path.kind} {address.ipv4_mapped or address}{f', {path.interface}' if path.interface else ''}"


def _exchanged(name: str, number: int) -> Finding:
    where = f"{name} exchange" if name == "sim" else f"{name}:{number} exchange"
    return measured(where, "with itself", lambda: exchange.with_itself(name, number))


def measured(where: str, how: str, probe: Callable[[], dict[str, float]]) -> Finding:
    """A finding of what a probe measures, or of why it could not."""
    try:
        figures = probe()
    except (RuntimeError, OSError, ValueError) as error:
        return Finding(
            ERROR, where, str(error), "dmesg, and the findings above" if not isinstance(error, ValueError) else ""
        )
    text = f"{how}: {in_seconds(figures['latency'])} there and back, {in_bytes(figures['bandwidth'])}/s"
    return Finding(OK, where, text, figures=figures)
