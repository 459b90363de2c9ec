"""Draws what side_by_side.py found: `python picture.py FOUND.json PICTURE.png`; runs in an environment with matplotlib.

For each transport and number of ranks one panel for each case that has several sizes, lines over the size on logarithmic axes,
and one for all cases of one size, bars. Bands and whiskers show the range of the rounds.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from itertools import cycle
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLUMNS = 4
STYLES = {"own": "-", "peer": "--", "limit": ":"}
COLOURS = {
    "own": ("#08519c", "#4292c6", "#9ecae1"),
    "peer": ("#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22"),
    "limit": ("black", "#888888"),
}
WIDTHS = {"own": 2.4, "peer": 1.2, "limit": 1.6}


def range_of(figure: dict[str, Any]) -> tuple[float, float, float]:
    """Median, least and largest round: microseconds where the figure is shown in them, else size over time in GB/s."""
    each = [statistics.median(repetitions) for repetitions in figure["rounds"]]
    values = sorted(value * 1e6 if figure["unit"] == "us" else figure["nbytes"] / value / 1e9 for value in each)
    return statistics.median(values), values[0], values[-1]


def lines(axes: Any, figures: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    for title, found in by("title", figures).items():
        sizes = [figure["nbytes"] for figure in found]
        middle, low, high = zip(*map(range_of, found))
        kind = found[0]["kind"]
        axes.plot(sizes, middle, STYLES[kind], lw=WIDTHS[kind], marker="o", ms=3, color=colours[title])
        axes.fill_between(sizes, low, high, color=colours[title], alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = dict(sorted((figure["nbytes"], figure["size"]) for figure in figures))
    axes.set_xticks(list(every), list(every.values()), rotation=30)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", alpha=0.3)


def bars(axes: Any, figures: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    cases = by("case", figures)
    for place, found in enumerate(cases.values()):
        width = 0.8 / len(found)
        for number, figure in enumerate(found):
            middle, low, high = range_of(figure)
            at = place + (number - (len(found) - 1) / 2) * width
            axes.bar(
                at,
                middle,
                width,
                yerr=[[middle - low], [high - middle]],
                color=colours[figure["title"]],
                error_kw={"lw": 0.8},
            )
    names = [f"{case}\n{found[0]['size']}" for case, found in cases.items()]
    axes.set_xticks(range(len(cases)), names, fontsize=7)
    axes.grid(True, axis="y", alpha=0.3)


def by(key: str, figures: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for figure in figures:
        groups.setdefault(figure[key], []).append(figure)
    return groups


def panels(figures: list[dict[str, Any]]) -> dict[tuple[str, int, str, str], list[dict[str, Any]]]:
    """Figures by transport, number of ranks, case ("" where each case has one size) and what is shown."""
    sizes: dict[tuple[str, int, str], set[int]] = {}
    for figure in figures:
        sizes.setdefault((figure["transport"], figure["world"], figure["case"]), set()).add(figure["nbytes"])
    found: dict[tuple[str, int, str, str], list[dict[str, Any]]] = {}
    for figure in figures:
        where = (figure["transport"], figure["world"], figure["case"])
        shown = "us, less is better" if figure["unit"] == "us" else "size / time in GB/s, more is better"
        key = (*where[:2], figure["case"] if len(sizes[where]) > 1 else "", shown)
        found.setdefault(key, []).append(figure)
    return found


def draw(found: dict[str, Any], path: str) -> None:
    shown = panels(found["figures"])
    kinds = {figure["title"]: figure["kind"] for figure in found["figures"]}
    unused = {kind: cycle(names) for kind, names in COLOURS.items()}
    colours = {title: next(unused[kind]) for title, kind in kinds.items()}
    columns = min(COLUMNS, max(1, len(shown)))
    down = max(1, math.ceil(len(shown) / columns))
    page, grid = plt.subplots(down, columns, figsize=(5 * columns, 3.6 * down + 1), squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, ((transport, world, case, what), figures) in zip(grid.flat, shown.items()):
        (lines if case else bars)(axes, figures, colours)
        axes.set_title(f"{transport}, {world} ranks: {case + ', ' if case else ''}{what}", fontsize=9)
    handles = [
        plt.Line2D([], [], color=colours[title], ls=STYLES[kind], lw=WIDTHS[kind], label=title)
        for title, kind in kinds.items()
    ]
    page.suptitle(found["machine"], fontsize=10)
    page.legend(handles=handles, loc="lower center", ncols=min(5, len(handles)), fontsize=8, frameon=False)
    page.tight_layout(rect=(0, 0.8 / (3.6 * down + 1), 1, 0.98))
    page.savefig(path, dpi=110)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        draw(json.load(file), sys.argv[2])
