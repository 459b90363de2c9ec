"""Draws what bench_objects_failure_ray.py found: steps of each second, a line for each way; SVG, no library needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["draw"]

COLOURS = ("#08519c", "#d62728", "#2ca02c")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 640, 240, 50, 40, 40, 20


def draw(per_second: Mapping[str, Sequence[float]], lost: float, back: float, unit: str) -> str:
    """SVG text.

    Parameters
    ----------
    per_second : mapping of str to sequence of float
        Of each way, what was done in each second.
    lost, back : float
        Seconds, when the host was killed and started again.
    unit : str
        Of what was done.
    """
    end = max(len(numbers) for numbers in per_second.values())
    most = max(1.0, *(max(numbers) for numbers in per_second.values()))

    def x(second: float) -> float:
        return LEFT + WIDTH * second / end

    def y(number: float) -> float:
        return TOP + HEIGHT * (1 - number / most)

    wide, tall = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{tall}" fill="white"/>',
        f'<rect x="{x(lost):.1f}" y="{TOP}" width="{x(back) - x(lost):.1f}" height="{HEIGHT}" fill="#eeeeee"/>',
        _text((x(lost) + x(back)) / 2, TOP + 14, "a host is gone", "middle"),
    ]
    for tick in range(5):
        number = most * tick / 4
        parts.append(f'<line x1="{LEFT}" x2="{x(end)}" y1="{y(number):.1f}" y2="{y(number):.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y(number) + 4, f"{number:.3g}", "end"))
    for second in range(0, end + 1, 5):
        parts.append(_text(x(second), TOP + HEIGHT + 16, f"{second} s", "middle"))
    for place, ((name, numbers), colour) in enumerate(zip(per_second.items(), COLOURS)):
        points = " ".join(f"{x(second + 0.5):.1f},{y(number):.1f}" for second, number in enumerate(numbers))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        left = LEFT + 120 * place
        parts.append(f'<rect x="{left}" y="10" width="12" height="12" fill="{colour}"/>{_text(left + 16, 20, name)}')
    parts.append(_text(x(end), 20, unit, "end"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
