"""Who holds what after each round of a schedule, as text: for small cases, to look at.

A row is a rank, a column a chunk; ``*`` is complete, ``.`` nothing, else the ranks whose contributions are in it.

    ring: allreduce, 3 ranks

    round 0  0    1    2
    rank 0   0    0,2  0
    rank 1   1    1    0,1
    rank 2   1,2  2    2
"""

from __future__ import annotations

from itertools import groupby

from hrdma.topo.layout import bringers
from hrdma.topo.schedule import CHUNK, DST, OP, REDUCE, ROUND, SPAN, SRC, Schedule

__all__ = ["holdings"]

MAX_CELLS = 1200  # ranks times chunks


def holdings(schedule: Schedule) -> str:
    """The text.

    Raises
    ------
    ValueError
        One rank's view, or more than 1200 ranks times chunks.
    """
    if schedule.view is not None:
        raise ValueError(f"this is rank {schedule.view}'s view; only a complete schedule shows who holds what")
    if schedule.size * schedule.chunks > MAX_CELLS:
        raise ValueError(
            f"{schedule.size} ranks times {schedule.chunks} chunks are too many to look at; the limit is {MAX_CELLS}"
        )
    needed, held = [], [[0] * schedule.chunks for _ in range(schedule.size)]
    for block in range(schedule.blocks):
        bringing = bringers(schedule.collective, schedule.size, schedule.root, block)
        needed += [sum(1 << rank for rank in bringing)] * schedule.split
        for rank in bringing:
            held[rank][block * schedule.split : (block + 1) * schedule.split] = [1 << rank] * schedule.split
    text = [str(schedule).splitlines()[0], "", *_table("start", held, needed)]
    for rnd, rows in groupby(schedule.table.tolist(), key=lambda row: row[ROUND]):
        before = [list(chunks) for chunks in held]
        for row in rows:
            for c in range(row[CHUNK], row[CHUNK] + row[SPAN]):
                more = before[row[SRC]][c]
                held[row[DST]][c] = held[row[DST]][c] | more if row[OP] == REDUCE else more
        text += ["", *_table(f"round {rnd}", held, needed)]
    return "\n".join(text)


def _table(title: str, held: list[list[int]], needed: list[int]) -> list[str]:
    cells = [[title, *map(str, range(len(needed)))]]
    for rank, chunks in enumerate(held):
        cells.append([f"rank {rank}", *(_cell(value, all_) for value, all_ in zip(chunks, needed, strict=True))])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(value: int, needed: int) -> str:
    """Ranks of a set in short: 0,1 or 0-3."""
    if not value:
        return "."
    if value == needed:
        return "*"
    ranks = [rank for rank in range(value.bit_length()) if value >> rank & 1]
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
