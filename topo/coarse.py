"""Coarsening: one rank's view of a schedule with chunks joined that this rank never tells apart.

A plan for thousands of ranks cuts the vector into thousands of chunks, but one rank sends and receives long runs of them.
Lowering works on chunks one by one, so runs between two bounds of this rank's transfers are made one chunk first. Order is
kept, so tags are; lengths add up, so both ends of a message still agree, though each coarsens for itself.
"""

from __future__ import annotations

import numpy as np

from hrdma.topo.layout import Layout
from hrdma.topo.schedule import CHUNK, SPAN

__all__ = ["coarsen"]

_WORTH = 4  # times fewer chunks


def coarsen(table: np.ndarray, layout: Layout) -> tuple[np.ndarray, Layout, list[int] | None]:
    """The rows and the layout in joined chunks, and the first old chunk of each; unchanged (None) where little is gained.

    Notes
    -----
    Runs of chunks must lie in memory one after the other, as those of all collectives but alltoall do. Cost: linear in
    rows and chunks, in numpy.
    """
    chunks = len(layout.lens)
    first, last = table[:, CHUNK], table[:, CHUNK] + table[:, SPAN]
    cut = np.zeros(chunks + 1, bool)
    cut[[0, chunks]] = True
    cut[first], cut[last] = True, True
    if np.count_nonzero(cut[:-1]) * _WORTH > chunks:
        return table, layout, None
    lens, in_off, out_off = (np.array(column, np.int64) for column in layout[:3])
    for offset in (in_off, out_off):
        away = offset < 0
        joined = np.where(away[1:], away[:-1], ~away[:-1] & (offset[:-1] + lens[:-1] == offset[1:]))
        cut[1:-1] |= ~joined
    starts = np.flatnonzero(cut[:-1])
    if len(starts) * _WORTH > chunks:
        return table, layout, None
    number = np.cumsum(cut[:-1]) - 1
    ends = np.append(number, len(starts))
    narrow = table.copy()
    narrow[:, CHUNK] = ends[first]
    narrow[:, SPAN] = ends[last] - ends[first]
    joined_lens = np.add.reduceat(lens, starts) if chunks else lens
    listed = (joined_lens.tolist(), in_off[starts].tolist(), out_off[starts].tolist())
    return narrow, layout._replace(lens=listed[0], in_off=listed[1], out_off=listed[2]), starts.tolist()
