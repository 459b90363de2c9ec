"""The memory of one rank while a schedule is lowered: where chunks are, which scratch is free, who touched what."""

from __future__ import annotations

from collections import deque

from hrdma.topo.layout import Layout
from hrdma.topo.program import BUF_IN, BUF_OUT, BUF_TMP

__all__ = ["Cells", "up"]


def up(nbytes: int) -> int:
    """Whole cache lines, and whole pages for long ranges."""
    return -(-nbytes // 64) * 64 if nbytes <= 4096 else -(-nbytes // 4096) * 4096


class Cells:
    """Places of chunks and ranges of scratch, each named by one integer, the *cell*.

    With n chunks: c is chunk c in IN, n + c in OUT, 2n + c in its fixed home in scratch, 3n + k the k-th slot of
    scratch. Two cells that are in use at one time never overlap, so dependencies are found by cell.
    """

    def __init__(self, layout: Layout, budget: int) -> None:
        self.layout, self.budget, self.n = layout, budget, len(layout.lens)
        self.lens, self.in_off, self.out_off = layout.lens, layout.in_off, layout.out_off
        self.writer: dict[int, int] = {}  # cell -> instruction
        self.readers: dict[int, list[int]] = {}  # since it was written
        self.tmp = 0  # bytes of scratch so far
        self.fixed: dict[int, int] = {}  # chunk -> offset of its fixed home
        self.slots: list[tuple[int, int]] = []  # (offset, bytes)
        self.free: dict[int, deque[int]] = {}  # bytes -> cells, the one that has been free for longest first

    def address(self, cell: int) -> tuple[int, int]:
        n = self.n
        if cell < n:
            return BUF_IN, self.in_off[cell]
        if cell < 2 * n:
            return BUF_OUT, self.out_off[cell - n]
        if cell < 3 * n:
            return BUF_TMP, self.fixed[cell - 2 * n]
        return BUF_TMP, self.slots[cell - 3 * n][0]

    def slot(self, nbytes: int) -> int:
        """A range of scratch: fresh while the budget lasts, then the one that has been free for longest."""
        need = up(nbytes)
        if self.tmp + need > self.budget:
            for size in sorted(self.free):
                if size >= need and self.free[size]:
                    return self.free[size].popleft()
        self.slots.append((self.tmp, need))
        self.tmp += need
        return 3 * self.n + len(self.slots) - 1

    def release(self, cell: int) -> None:
        self.free.setdefault(self.slots[cell - 3 * self.n][1], deque()).append(cell)

    def runs(self, chunks: list[int], *places: list[int]) -> list[tuple[int, int]]:
        """Cuts chunks into runs that are contiguous in each list of cells: positions (from, to) in `chunks`."""
        length = sum([self.lens[c] for c in chunks[:-1]])
        for cells in places:
            first, last = cells[0], cells[-1]
            if last >= 3 * self.n or cells != list(range(first, first + len(cells))):
                break
            if self.address(last)[1] - self.address(first)[1] != length:
                break
        else:
            return [(0, len(chunks))]
        found, start = [], 0
        addresses = [[self.address(cell) for cell in cells] for cells in places]
        for i in range(1, len(chunks) + 1):
            if i < len(chunks) and all(
                (buf, off + self.lens[chunks[i - 1]]) == a[i] for a in addresses for buf, off in (a[i - 1],)
            ):
                continue
            found.append((start, i))
            start = i
        return found

    def to_read(self, cells) -> set[int]:
        return {self.writer[cell] for cell in cells if cell in self.writer}

    def to_write(self, cells) -> set[int]:
        deps: set[int] = set()
        for cell in cells:
            readers = self.readers.get(cell)
            if readers:
                deps.update(readers)
            elif cell in self.writer:
                deps.add(self.writer[cell])
        return deps

    def has_read(self, index: int, cells) -> None:
        for cell in cells:
            self.readers.setdefault(cell, []).append(index)

    def has_written(self, index: int, cells) -> None:
        for cell in cells:
            self.writer[cell] = index
            self.readers[cell] = []
