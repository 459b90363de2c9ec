"""Pictures of fabrics as SVG: the nodes, the links, and what a schedule puts on each of them, in all and per round.

A link is two curves, one for each direction; width and shade show its load as a share of the most loaded one of the
picture (grey and thin: none). Hosts are round, switches square. Grids are drawn as grids, rings and what has no switches
as a circle, all else in layers: hosts below, switches above, those of a BCube by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, hypot, pi, sin
from xml.sax.saxutils import escape

import numpy as np

from hrdma.topo.fabric import Fabric, digits
from hrdma.topo.routing import Routes, link_loads
from hrdma.topo.schedule import Schedule
from hrdma.topo.units import in_bytes

__all__ = ["draw", "positions"]

MAX_NODES = 400
MAX_PANELS = 24
_WIDTH, _HEIGHT, _TITLE, _MARGIN = 340.0, 250.0, 34.0, 24.0
_COLUMNS = 4


def positions(fabric: Fabric) -> list[tuple[float, float]]:
    """Where each node is drawn, both coordinates in [0, 1]."""
    if fabric.kind in ("torus", "mesh") and len(fabric.shape) > 1:
        return [_grid(digits(host, fabric.shape), fabric.shape) for host in range(fabric.hosts)]
    if not fabric.switches:
        angles = [2 * pi * host / fabric.hosts - pi / 2 for host in range(fabric.hosts)]
        return [(0.5 + 0.45 * cos(angle), 0.5 + 0.45 * sin(angle)) for angle in angles]
    layers: dict[int, list[int]] = {}
    for node, layer in enumerate(_layers(fabric)):
        layers.setdefault(layer, []).append(node)
    placed = [(0.0, 0.0)] * fabric.nodes
    for layer, nodes in layers.items():
        for at, node in enumerate(nodes):
            placed[node] = (at + 0.5) / len(nodes), 1 - layer / max(layers)
    return placed


def _grid(place: Sequence[int], shape: Sequence[int]) -> tuple[float, float]:
    """Dimension 0 to the right, 1 down, further ones as smaller grids within."""
    x, y, extent = [0.0, 0.0], (0, 1), [1.0, 1.0]
    for dimension in reversed(range(len(shape))):
        axis = y[dimension % 2]
        extent[axis] /= shape[dimension]
        x[axis] += place[dimension] * extent[axis]
    return x[0] + extent[0] / 2, x[1] + extent[1] / 2


def _layers(fabric: Fabric) -> list[int]:
    """0 for hosts; for switches their level in a BCube, else one more than the nearest node below."""
    layers = [0] * fabric.hosts + [-1] * fabric.switches
    if fabric.kind == "bcube":
        for host in range(fabric.hosts):
            for _, switch, nic in fabric.around[host]:
                layers[switch] = nic + 1
        return layers
    todo = list(range(fabric.hosts))
    for node in todo:
        for _, other, _ in fabric.around[node]:
            if layers[other] < 0:
                layers[other] = layers[node] + 1
                todo.append(other)
    return layers


def draw(
    fabric: Fabric, schedule: Schedule | None = None, nbytes: float = 1 << 20, rounds: Sequence[int] | None = None
) -> str:
    """The picture.

    Parameters
    ----------
    fabric : Fabric
    schedule : Schedule, optional
        Complete; without one, the bare fabric.
    nbytes : float
        Of the whole vector, for the numbers in the titles.
    rounds : sequence of int, optional
        Which rounds have a panel of their own after that of all together; by default all, up to 23.

    Returns
    -------
    str
        SVG.

    Raises
    ------
    ValueError
        Too many nodes to tell apart, or a round that the schedule does not have.
    ScheduleError
        A schedule for another number of ranks.
    """
    if fabric.nodes > MAX_NODES:
        raise ValueError(f"{fabric.name} has {fabric.nodes} nodes; pictures show up to {MAX_NODES}")
    nlinks = 2 * len(fabric.links)
    panels: list[tuple[str, np.ndarray]] = [(str(fabric), np.zeros(nlinks))]
    if schedule is not None:
        loads = link_loads(schedule, Routes(fabric), nbytes)[:, :nlinks]
        chosen = range(min(schedule.nrounds, MAX_PANELS - 1)) if rounds is None else rounds
        for rnd in chosen:
            if not 0 <= rnd < schedule.nrounds:
                raise ValueError(f"{schedule.name or 'the schedule'} has no round {rnd}; it has {schedule.nrounds}")
        whole = f"{schedule.name or 'schedule'}, {schedule.collective} of {in_bytes(nbytes)}, {schedule.nrounds} rounds"
        panels = [(whole, loads.sum(axis=0))]
        panels += [(f"round {rnd}", loads[rnd]) for rnd in chosen]
    placed = positions(fabric)
    columns = min(len(panels), _COLUMNS)
    height = -(-len(panels) // columns) * (_HEIGHT + _TITLE)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * _WIDTH:.0f} {height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, load) in enumerate(panels):
        lines += _panel(fabric, placed, title, load, number % columns * _WIDTH, number // columns * (_HEIGHT + _TITLE))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(fabric: Fabric, placed, title: str, load: np.ndarray, left: float, top: float) -> list[str]:
    most = float(load.max(initial=0.0))
    if most:
        title += f": up to {in_bytes(most)} a link"
    lines = [f'<g transform="translate({left:.0f} {top:.0f})">', f'<text x="8" y="18">{escape(title)}</text>']
    wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    spots = [(_MARGIN + x * wide, _TITLE + _MARGIN + y * high) for x, y in placed]
    for directed in np.argsort(load, kind="stable").tolist():  # the loaded ones above the others
        a, b = fabric.ends(directed)
        lines.append(
            _curve(spots[a.node], spots[b.node], load[directed] / most if most else 0.0, fabric, a.node, b.node)
        )
    radius = max(2.0, min(9.0, 120 / fabric.nodes))
    for node, (x, y) in enumerate(spots):
        if node < fabric.hosts:
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#1b4965"/>')
        else:
            lines.append(
                f'<rect x="{x - radius:.1f}" y="{y - radius:.1f}" width="{2 * radius:.1f}" height="{2 * radius:.1f}" '
                'fill="#6c757d"/>'
            )
        if radius > 5:
            name = node if node < fabric.hosts else node - fabric.hosts
            lines.append(
                f'<text x="{x:.1f}" y="{y + 3.5:.1f}" fill="white" font-size="9" text-anchor="middle">{name}</text>'
            )
    return [*lines, "</g>"]


def _curve(start, end, share: float, fabric: Fabric, a: int, b: int) -> str:
    """One direction of a link; those around a torus bow out, so that they pass beside what lies between."""
    (x0, y0), (x1, y1) = start, end
    length = hypot(x1 - x0, y1 - y0) or 1.0
    bow = 5.0
    if fabric.kind == "torus" and any(
        abs(p - q) > 1 for p, q in zip(digits(a, fabric.shape), digits(b, fabric.shape), strict=True)
    ):
        bow = 0.12 * length
    x, y = (x0 + x1) / 2 - (y1 - y0) / length * bow, (y0 + y1) / 2 + (x1 - x0) / length * bow
    shade = [round(226 + (dark - 226) * share) for dark in (200, 35, 20)] if share else [222, 226, 230]
    return (
        f'<path d="M{x0:.1f} {y0:.1f}Q{x:.1f} {y:.1f} {x1:.1f} {y1:.1f}" fill="none" '
        f'stroke="rgb({shade[0]},{shade[1]},{shade[2]})" stroke-width="{0.8 + 2.7 * share:.2f}"/>'
    )
