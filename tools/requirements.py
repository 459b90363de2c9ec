"""Prints the requirements of groups in pyproject.toml, one a line: ``build``, ``run`` and the names of the extras.

So that pip can bring them without building hrdma first, which needs the group ``build`` itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, whose pip has one of its own
    from pip._vendor import tomli as tomllib


def groups(pyproject: dict[str, Any]) -> dict[str, list[str]]:
    project = pyproject["project"]
    named = {"build": pyproject["build-system"]["requires"], "run": project["dependencies"]}
    return named | project["optional-dependencies"]


def main(names: list[str]) -> None:
    known = groups(tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text()))
    for name in names:
        if name not in known:
            sys.exit(f"requirements: no group {name!r} in pyproject.toml, which has: {', '.join(sorted(known))}")
        print(*known[name], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
