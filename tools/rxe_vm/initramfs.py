"""The initramfs: a cpio archive (format newc) with busybox, the modules that mount the host's root, and the guest's job."""

from __future__ import annotations

import lzma
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from rxe_vm.kernel import Kernel

HERE = Path(__file__).resolve().parent
BUSYBOX = Path("/bin/busybox")  # of busybox-static

#: What stands between the kernel and the host's root, and what carries the results.
MODULES = ("virtio_pci", "virtio_console", "virtio_net", "9pnet_virtio", "9p", "overlay")

FOLDERS = ("bin", "dev", "lower", "modules", "proc", "root", "sys", "upper")


def initramfs(kernel: Kernel, job: Mapping[str, str], command: Sequence[str]) -> bytes:
    """The archive's bytes.

    Parameters
    ----------
    job : mapping
        Variables of the command's environment, and of the script that sets the guest up (guest/start).
    command : sequence of str
        Program and arguments.
    """
    files = [("init", stat.S_IFREG | 0o755, (HERE / "guest" / "init").read_bytes())]
    files += [(name, stat.S_IFDIR | 0o755, b"") for name in FOLDERS]
    files.append(("bin/busybox", stat.S_IFREG | 0o755, BUSYBOX.read_bytes()))
    for place, path in enumerate(kernel.modules_for(*MODULES)):
        name = path.name.partition(".ko")[0]
        files.append((f"modules/{place:02}-{name}.ko", stat.S_IFREG | 0o644, _module(path)))
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.items()]
    files.append(("job", stat.S_IFREG | 0o644, "\n".join([*lines, f"set -- {shlex.join(command)}", ""]).encode()))
    return b"".join(_entry(number, *file) for number, file in enumerate(files, 1)) + _entry(0, "TRAILER!!!", 0, b"")


def _module(path: Path) -> bytes:
    """A module's plain bytes: busybox need not know how a newer Debian packs them."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _entry(number: int, name: str, mode: int, data: bytes) -> bytes:
    """One file of the archive: 13 numbers of 8 hexadecimal digits, the name, the data, each padded to 4 bytes."""
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    return header + b"\0" * (-len(header) % 4) + data + b"\0" * (-len(data) % 4)
