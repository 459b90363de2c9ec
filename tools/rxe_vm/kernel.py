"""The guest's kernel: Debian's own package, fetched once and unpacked in build/rxe_vm/kernel; nothing is installed.

The package's image unpacks itself when it starts, which is most of the boot where QEMU translates; so it is unpacked here, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import lzma
import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rxe_vm.packages import StageError

PACKAGE = "linux-image-amd64"  # depends on the package of the current kernel
FETCH_SECONDS = 300
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # depmod and modprobe, for those who are not root


class Kernel(NamedTuple):
    """An unpacked kernel package."""

    home: Path  #: what the package would put under /
    release: str

    @property
    def image(self) -> Path:
        return self.home / "boot" / f"vmlinux-{self.release}"

    @property
    def modules(self) -> Path:
        return self.home / "lib" / "modules" / self.release

    def modules_for(self, *names: str) -> list[Path]:
        """Files of these modules and of all that they depend on, in the order in which they can be loaded."""
        found: dict[Path, None] = {}
        for name in names:
            shown = _output("modprobe", "-d", str(self.home), "-S", self.release, "--show-depends", name)
            found |= {Path(path): None for path in re.findall(r"^insmod (\S+)", shown, re.MULTILINE)}
        return list(found)


def kernel(cache: Path) -> Kernel:
    """The kernel in this folder, which is fetched when it is not there.

    Raises
    ------
    StageError
        apt does not have the package, or cannot fetch it within `FETCH_SECONDS`, or it is not packed as we know it.
    """
    home = cache / "kernel"
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / "lock"):
        if not home.exists():
            _fetch(home)
    (release,) = os.listdir(home / "lib" / "modules")
    return Kernel(home, release)


def _fetch(home: Path) -> None:
    """Unpacks the package next to `home` and moves it there last, so that what is there is whole."""
    name = _package_name()
    print(f"rxe_vm: fetching {name} (70 MB, once)", flush=True)
    fresh = home.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    _output("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", name, cwd=fresh)
    (archive,) = fresh.glob("*.deb")
    _output("dpkg-deb", "--extract", str(archive), str(fresh))
    archive.unlink()
    if not (fresh / "lib").exists():  # newer packages put it where /lib points to
        (fresh / "lib").symlink_to("usr/lib")
    if not (fresh / "lib" / "modules").is_dir():
        raise StageError(f"{name} has no modules: this distribution packs its kernels in a way that is not known here")
    (release,) = os.listdir(fresh / "lib" / "modules")
    _output("depmod", "-b", str(fresh), release)
    packed = fresh / "boot" / f"vmlinuz-{release}"
    Kernel(fresh, release).image.write_bytes(unpacked(packed.read_bytes()))
    packed.unlink()
    fresh.rename(home)


def unpacked(image: bytes) -> bytes:
    """The ELF file in a bzImage of x86, which QEMU starts by its PVH entry.

    References
    ----------
    The Linux kernel documentation, "The Linux/x86 Boot Protocol": setup_sects, payload_offset, payload_length.
    """
    if image[0x202:0x206] != b"HdrS":
        raise StageError("the kernel's image is not a bzImage: no HdrS at 0x202")
    start = (image[0x1F1] + 1) * 512 + struct.unpack_from("<I", image, 0x248)[0]
    payload = image[start : start + struct.unpack_from("<I", image, 0x24C)[0]]
    lzma_stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    try:
        data = lzma_stream.decompress(payload)  # four bytes follow, the length, which are not for lzma
    except lzma.LZMAError as error:
        raise StageError(f"the kernel's image is not packed with xz: {error}") from None
    if not lzma_stream.eof:
        raise StageError(f"the kernel's image ends within its payload of {len(payload)} bytes")
    return data


def _package_name() -> str:
    """What `PACKAGE` depends on; as root with fresh lists where the ones that are here do not know it."""
    asked = ["apt-cache", "depends", "--important", PACKAGE]
    for update in (False, True):
        if update and os.getuid() == 0:
            _output("apt-get", "update", "-qq")
        with contextlib.suppress(StageError):
            if match := re.search(r"Depends: (linux-image-\S+)", _output(*asked)):
                return match[1]
    raise StageError(f"apt has no package {PACKAGE}; on Debian (amd64) run: sudo apt update")


def _output(*command: str, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "PATH": SYSTEM_PATH, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
        )
    except FileNotFoundError:
        raise StageError(f"{command[0]} is not here; this needs Debian") from None
    except subprocess.TimeoutExpired:
        raise StageError(f"no end within {FETCH_SECONDS} s: {' '.join(command)}") from None
    if done.returncode:
        raise StageError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock when its holder ends, however it ends."""
    deadline = time.monotonic() + FETCH_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StageError(f"somebody has held {path} for {FETCH_SECONDS} s") from None
                time.sleep(0.1)
        yield
