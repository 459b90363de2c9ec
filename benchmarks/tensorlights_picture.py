"""Draws what bench_tensorlights.py found: average completion times as bars, the slowest job as a whisker; SVG, no library needed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["draw"]

COLOURS = ("#8c8c8c", "#08519c", "#6baed6")
BAR, GAP, HEIGHT, LEFT, TOP, BOTTOM = 26, 30, 240, 50, 40, 50


def draw(results: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> str:
    """SVG text.

    Parameters
    ----------
    results : sequence of mapping
        Each with ``placement``, ``ratio``, ``policy``, ``completion`` (seconds, by job).
    policies : sequence of str
        In the order of the bars.
    """
    groups = list(dict.fromkeys((one["placement"], one["ratio"]) for one in results))
    most = max(max(one["completion"]) for one in results)
    width = LEFT + len(groups) * (BAR * len(policies) + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + BOTTOM}" font-family="sans-serif"'
        ' font-size="11">',
        f'<rect width="{width}" height="{TOP + HEIGHT + BOTTOM}" fill="white"/>',
    ]
    for i, (policy, colour) in enumerate(zip(policies, COLOURS)):
        x = LEFT + 90 * i
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>{_text(x + 16, 20, policy)}')
    for tick in range(5):
        value = most * tick / 4
        y = TOP + HEIGHT * (1 - tick / 4)
        parts.append(f'<line x1="{LEFT}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:.3g} s", "end"))
    for g, (placement, ratio) in enumerate(groups):
        first = LEFT + GAP + g * (BAR * len(policies) + GAP)
        for i, (policy, colour) in enumerate(zip(policies, COLOURS)):
            ours = [
                one for one in results if (one["placement"], one["ratio"], one["policy"]) == (placement, ratio, policy)
            ]
            if not ours:
                continue
            average = statistics.median(statistics.mean(one["completion"]) for one in ours)
            slowest = statistics.median(max(one["completion"]) for one in ours)
            x, tall = first + i * BAR, HEIGHT * average / most
            middle, top = x + BAR / 2 - 2, TOP + HEIGHT * (1 - slowest / most)
            parts.append(
                f'<rect x="{x}" y="{TOP + HEIGHT - tall:.1f}" width="{BAR - 4}" height="{tall:.1f}" fill="{colour}"/>'
                f'<line x1="{middle}" x2="{middle}" y1="{top:.1f}" y2="{TOP + HEIGHT - tall:.1f}" stroke="black"/>'
            )
        centre = first + BAR * len(policies) / 2
        parts.append(_text(centre, TOP + HEIGHT + 16, f"servers {placement}", "middle"))
        parts.append(_text(centre, TOP + HEIGHT + 30, f"ratio {ratio:g}", "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
