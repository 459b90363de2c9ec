"""Draws what side_by_side.py found: `python picture.py FOUND.json PICTURE.png`; runs in an environment with matplotlib.

One panel for each transport, number of ranks and case. Cases of several sizes are lines over the size, on logarithmic axes;
those of one size are bars. Bars and bands show the range of the rounds.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLUMNS = 3
STYLES = {"own": "-", "peer": "--", "limit": ":"}
WIDTHS = {"own": 2.4, "peer": 1.2, "limit": 1.6}


def size_name(nbytes: int) -> str:
    power = min(3, int(math.log(nbytes, 1024)))
    return f"{nbytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def range_of(figure: dict[str, Any]) -> tuple[float, float, float]:
    """Median, least and largest round: microseconds where the figure is shown in them, else size over time in GB/s."""
    each = [statistics.median(repetitions) for repetitions in figure["rounds"]]
    values = sorted(value * 1e6 if figure["unit"] == "us" else figure["nbytes"] / value / 1e9 for value in each)
    return statistics.median(values), values[0], values[-1]


def lines(axes: Any, rows: dict[str, list[dict[str, Any]]], colours: dict[str, Any]) -> None:
    for title, figures in rows.items():
        sizes = [figure["nbytes"] for figure in figures]
        middle, low, high = zip(*map(range_of, figures))
        kind = figures[0]["kind"]
        axes.plot(sizes, middle, STYLES[kind], lw=WIDTHS[kind], marker="o", ms=3, color=colours[title], label=title)
        axes.fill_between(sizes, low, high, color=colours[title], alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = sorted({figure["nbytes"] for figures in rows.values() for figure in figures})
    axes.set_xticks(every, [size_name(size) for size in every], rotation=30)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", alpha=0.3)


def bars(axes: Any, rows: dict[str, list[dict[str, Any]]], colours: dict[str, Any]) -> None:
    for place, (title, figures) in enumerate(reversed(rows.items())):
        middle, low, high = range_of(figures[0])
        span = [[middle - low], [high - middle]]
        axes.barh(place, middle, xerr=span, color=colours[title], height=0.7, error_kw={"lw": 1})
        axes.text(middle, place, f" {middle:.3g}", va="center", ha="left", fontsize=7)
    axes.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=7)
    axes.grid(True, axis="x", alpha=0.3)


def draw(found: dict[str, Any], path: str) -> None:
    panels: dict[tuple, dict[str, list[dict[str, Any]]]] = {}
    for figure in found["figures"]:
        panel = panels.setdefault((figure["transport"], figure["world"], figure["case"]), {})
        panel.setdefault(figure["title"], []).append(figure)
    titles = list(dict.fromkeys(figure["title"] for figure in found["figures"]))
    colours = {title: plt.get_cmap("tab20" if len(titles) > 10 else "tab10")(i) for i, title in enumerate(titles)}
    down = max(1, math.ceil(len(panels) / COLUMNS))
    page, grid = plt.subplots(down, COLUMNS, figsize=(5.2 * COLUMNS, 3.6 * down + 1), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, ((transport, world, case), rows) in zip(grid.flat, panels.items()):
        single = len({figure["nbytes"] for figures in rows.values() for figure in figures}) == 1
        (bars if single else lines)(axes, rows, colours)
        some = next(iter(rows.values()))[0]
        size = f" {size_name(some['nbytes'])}" if single else ""
        unit = "us, less is better" if some["unit"] == "us" else "size / time in GB/s, more is better"
        axes.set_title(f"{transport}, {world} ranks: {case}{size}, {unit}", fontsize=9)
    handles = [
        plt.Line2D([], [], color=colours[title], ls=STYLES[kind], lw=WIDTHS[kind], label=title)
        for title, kind in {figure["title"]: figure["kind"] for figure in found["figures"]}.items()
    ]
    page.suptitle(found["machine"], fontsize=10)
    page.legend(handles=handles, loc="lower center", ncols=min(5, len(handles)), fontsize=8, frameon=False)
    page.tight_layout(rect=(0, 0.8 / (3.6 * down + 1), 1, 0.98))
    page.savefig(path, dpi=110)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        draw(json.load(file), sys.argv[2])
