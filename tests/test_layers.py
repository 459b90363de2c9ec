"""Who may import whom: the arrows of the architecture, for Python imports and for C includes; and how long files get.

The rules are data, the checkers take the root of a tree and return what is wrong there. They run on this tree, and on
sabotaged ones that they must catch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
HOMES = {"hrdma": "hrdma", "topo": "hrdma.topo", "qos": "hrdma.qos"}  # folder -> package
LONGEST_FILE = 500  # lines; files are meant to stay near 400


class Rule(NamedTuple):
    """What a module may import: modules of hrdma (with all below them), and what is neither hrdma nor standard library."""

    hrdma: str = ""
    others: str = ""


BASE = "hrdma.types hrdma.errors hrdma.units"
SETTINGS = "hrdma.config hrdma.world hrdma.log"
API = "hrdma.communicator hrdma.collectives hrdma.runtime"

# The most specific entry counts; a module may always import what is in its own entry. "hrdma" alone is the bare
# package, which fetches names when they are used. Every module needs an entry: a new one is a decision about layers.
RULES = {
    "hrdma.types": Rule(),
    "hrdma.errors": Rule(),
    "hrdma.units": Rule(),
    "hrdma.topo": Rule(BASE, "numpy tomli"),
    "hrdma.qos": Rule(f"{BASE} hrdma.qos.client hrdma.qos.files", "click rich tomli"),
    "hrdma.qos.files": Rule(BASE),
    # The socket's other end: what a job may know of the controller.
    "hrdma.qos.client": Rule(f"{BASE} hrdma.qos.files"),
    "hrdma._core": Rule(BASE, "numpy ml_dtypes"),
    "hrdma.log": Rule(),
    "hrdma.config": Rule("hrdma.world"),
    "hrdma.world": Rule("hrdma.config"),
    "hrdma.control": Rule(f"{BASE} {SETTINGS}", "zmq"),
    # These two see both sides: one plans what the core runs, the other measures what the plans' cost model needs.
    "hrdma.nics": Rule("hrdma.topo"),
    "hrdma.planning": Rule(f"{BASE} hrdma.topo hrdma._core hrdma.communicator hrdma.discovery", "numpy"),
    "hrdma.discovery": Rule(f"{BASE} {SETTINGS} hrdma.communicator hrdma.nics hrdma.topo", "numpy"),
    "hrdma.calibration": Rule(f"{BASE} {SETTINGS} hrdma hrdma.planning hrdma.topo hrdma._core", "numpy"),
    "hrdma.traffic": Rule(f"{BASE} {SETTINGS} hrdma._core hrdma.qos.client"),
    "hrdma.classes": Rule(f"{BASE} hrdma.providers hrdma.communicator hrdma.runtime"),
    "hrdma.communicator": Rule(
        f"{BASE} {SETTINGS} {API} hrdma._core hrdma.classes hrdma.planning hrdma.given", "numpy"
    ),
    "hrdma.given": Rule(f"{BASE} hrdma.communicator hrdma.planning"),
    "hrdma.collectives": Rule(f"{BASE} {SETTINGS} {API} hrdma._core hrdma.planning", "numpy"),
    "hrdma.providers": Rule(f"{BASE} {SETTINGS} hrdma._core"),
    "hrdma.remarks": Rule("hrdma.runtime"),
    "hrdma.runtime": Rule(
        f"{BASE} {SETTINGS} {API} hrdma._core hrdma.planning hrdma.calibration hrdma.control hrdma.nics hrdma.providers hrdma.remarks "
        "hrdma.traffic hrdma.classes"
    ),
    "hrdma.objects": Rule(
        f"{BASE} {SETTINGS} {API} hrdma hrdma._core hrdma.control hrdma.providers hrdma.verbs", "numpy ml_dtypes"
    ),
    "hrdma.verbs": Rule("hrdma._core"),
    "hrdma.places": Rule(),
    # Ranks of their own for the tests of a user's job.
    "hrdma.children": Rule("hrdma hrdma._core hrdma.places"),
    "hrdma.testing": Rule("hrdma.children hrdma.places"),
    "hrdma.launch": Rule(f"{BASE} {SETTINGS} hrdma.places", "click rich"),
    # One setting of a NIC that pyroute2 does not know, by the controller's messages.
    "hrdma.lab": Rule(f"{BASE} hrdma.topo hrdma.launch hrdma.places hrdma.communicator hrdma.qos", "numpy pyroute2"),
    "hrdma.rxe": Rule(f"{BASE} hrdma.nics hrdma.qos"),
    # Reads the NICs' own priorities with the controller's messages, so that those are written once.
    "hrdma.doctor": Rule(f"{BASE} {SETTINGS} {API} hrdma hrdma.verbs hrdma.nics hrdma.qos", "numpy"),
    "hrdma.bench": Rule(f"{BASE} {SETTINGS} {API} hrdma", "numpy ml_dtypes"),
    "hrdma.bench.fabrics": Rule(f"{BASE} {API} hrdma hrdma.planning hrdma.topo hrdma.lab", "numpy"),
    "hrdma.cli": Rule(
        f"{BASE} {SETTINGS} {API} hrdma hrdma._core hrdma.topo hrdma.bench hrdma.bench.fabrics hrdma.launch hrdma.lab hrdma.planning "
        "hrdma.providers hrdma.doctor hrdma.rxe",
        "click rich",
    ),
    "hrdma.__main__": Rule("hrdma.cli"),
    "hrdma.examples": Rule(f"{BASE} hrdma hrdma.integrations", "numpy rich ray"),
    "hrdma.integrations": Rule(f"{BASE} {SETTINGS} {API} hrdma hrdma.objects", "numpy torch ray dask distributed"),
    "hrdma": Rule(),
}
BINDING = "hrdma._core"  # the .pyx and .pxi of cython/ together


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def entry_of(module: str) -> str | None:
    """The entry that counts for a module; "hrdma" is the bare package and stands for no other module."""
    found = [name for name in RULES if module == name or (name != "hrdma" and within(module, name))]
    return max(found, key=len, default=None)


# --- Python ---


def type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported(node: ast.AST, names_for_types: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, wherever it stands; ``from a import b`` counts as a.b."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            start = "." * child.level + (child.module or "")
            yield from ((child.lineno, f"{start}.{alias.name}") for alias in child.names)
        elif isinstance(child, ast.If) and type_checking(child) and not names_for_types:
            for other in child.orelse:
                yield from imported(other, names_for_types)
        else:
            yield from imported(child, names_for_types)


def problem_of(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, or None."""
    entry = entry_of(module)
    if entry is None:
        return f"{module} has no entry in RULES of tests/test_layers.py"
    rule = RULES[entry]
    if name.startswith("."):
        return f"imports {name}: write the full name, hrdma. ..."
    top = name.split(".")[0]
    if top == "hrdma":
        target = entry_of(name) or "hrdma"  # hrdma.init and such: a name of the bare package
        if target == entry or target in rule.hrdma.split():
            return None
        return f"imports {name}; {entry} may import of hrdma: {rule.hrdma or 'nothing'}"
    if top in HOMES:
        return f"imports {name}: write {HOMES[top]}, or there are two copies of every class"
    if top in sys.stdlib_module_names or top in rule.others.split():
        return None
    return f"imports {name}; {entry} may import of others: {rule.others or 'nothing'}"


def python_problems(root: Path) -> list[str]:
    found = []
    for folder, package in HOMES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            module = ".".join([package, *(part for part in parts if part != "__init__")])
            tree = ast.parse(path.read_text())
            for line, name in imported(tree, names_for_types=module != "hrdma"):
                if problem := problem_of(module, name):
                    found.append(f"{path.relative_to(root)}:{line}: {problem}")
    return found


CYTHON_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import|import\s+([\w.]+))")


def cython_problems(root: Path) -> list[str]:
    found = []
    for path in sorted(p for p in (root / "cython").rglob("*") if p.suffix in (".pyx", ".pxi", ".pxd")):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            match = CYTHON_IMPORT.match(text)
            if match and (problem := problem_of(BINDING, match[1] or match[2])):
                found.append(f"{path.relative_to(root)}:{line}: {problem}")
    if (root / "cython" / "__init__.py").exists():
        found.append("cython/__init__.py: shadows Cython's own module")
    return found


# --- C ---

INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]')
PUBLIC = "cython/include"


def reachable(path: Path, root: Path) -> tuple[str, ...]:
    """Folders whose files this one may include."""
    parts = path.relative_to(root / "cython").parts
    if parts[0] == "include":
        return (f"{PUBLIC}/hr",)
    if parts[0] == "core":
        table = ("cython/providers/providers.def",) if path.name == "registry.c" else ()
        return (f"{PUBLIC}/hr", "cython/core", *table)
    return (f"{PUBLIC}/hr", f"cython/providers/{parts[1]}")


def include_problems(root: Path) -> list[str]:
    """Includes that leave the folders a file may see; those of the system are none of our files."""
    found = []
    for path in sorted(p for p in (root / "cython").rglob("*") if p.suffix in (".c", ".h") and p.name != "_core.c"):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(text)
            places = [path.parent, root / PUBLIC, root / "cython"] if match else []
            target = next((place / match[1] for place in places if match and (place / match[1]).is_file()), None)
            if target is None:
                continue
            name = target.resolve().relative_to(root.resolve()).as_posix()
            allowed = reachable(path, root)
            if not any(name == place or name.startswith(place + "/") for place in allowed):
                found.append(f"{path.relative_to(root)}:{line}: includes {name}; may include {', '.join(allowed)}")
    return found


# --- length ---


def long_files(root: Path) -> list[str]:
    folders = [*HOMES, "cython", "tests", "tools", "benchmarks"]
    suffixes = {".py", ".pyi", ".pyx", ".pxi", ".pxd", ".c", ".h", ".sh"}
    found = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in suffixes):
        lines = path.read_text().count("\n")
        if lines > LONGEST_FILE and path.name != "_core.c":
            found.append(f"{path.relative_to(root)}: {lines} lines; more than {LONGEST_FILE} are more than one idea")
    return found


CHECKS = [python_problems, cython_problems, include_problems, long_files]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_this_tree(check):
    problems = check(ROOT)
    assert not problems, "\n".join(problems)


def test_every_rule_is_about_something():
    """A misspelt name in the table would permit or forbid nothing, silently."""
    named = {name for rule in RULES.values() for name in rule.hrdma.split()}
    assert named <= set(RULES), named - set(RULES)


SABOTAGE = [
    ("topo/x.py", "from hrdma.communicator import Communicator", "hrdma.topo may import of hrdma"),
    ("topo/x.py", "from hrdma import _core", "hrdma.topo may import of hrdma"),
    ("topo/x.py", "def f():\n    import hrdma.planning", "hrdma.topo may import of hrdma"),
    ("topo/x.py", "from topo.schedule import Schedule", "two copies of every class"),
    ("topo/deep/x.py", "from ..schedule import Schedule", "write the full name"),
    ("topo/x.py", "import networkx", "hrdma.topo may import of others"),
    ("qos/x.py", "import hrdma.topo", "hrdma.qos may import of hrdma"),
    ("hrdma/errors.py", "import hrdma.types", "hrdma.errors may import of hrdma: nothing"),
    ("hrdma/communicator.py", "from hrdma.topo.cost import Cost", "hrdma.communicator may import of hrdma"),
    ("hrdma/communicator.py", "import zmq", "hrdma.communicator may import of others"),
    ("hrdma/control/x.py", "try:\n    pass\nfinally:\n    import click", "hrdma.control may import of others"),
    ("hrdma/control/x.py", "from hrdma.runtime import init", "hrdma.control may import of hrdma"),
    ("hrdma/runtime.py", "from hrdma.qos.client import Client", "hrdma.runtime may import of hrdma"),
    ("hrdma/traffic.py", "from hrdma.qos.policy import Job", "hrdma.traffic may import of hrdma"),
    ("qos/client.py", "from hrdma.qos.apply import Control", "hrdma.qos.client may import of hrdma"),
    ("hrdma/runtime.py", "import torch", "hrdma.runtime may import of others"),
    ("hrdma/runtime.py", "if TYPE_CHECKING:\n    from hrdma.cli import main", "hrdma.runtime may import of hrdma"),
    ("hrdma/integrations/torch.py", "import hrdma._core", "hrdma.integrations may import of hrdma"),
    ("hrdma/__init__.py", "import numpy", "hrdma may import of others: nothing"),
    ("hrdma/novelty.py", "import os", "no entry in RULES"),
    ("cython/bind/x.pxi", "from hrdma.config import Config", "hrdma._core may import of hrdma"),
    ("cython/bind/x.pxi", "    import zmq", "hrdma._core may import of others"),
    ("cython/__init__.py", "", "shadows Cython"),
    ("cython/providers/tcp/x.c", '#include "core/engine.h"', "includes cython/core/engine.h"),
    ("cython/providers/tcp/x.c", '#include "../shm/shm.h"', "includes cython/providers/shm/shm.h"),
    ("cython/providers/tcp/x.c", "#  include <providers/shm/shm.h>", "includes cython/providers/shm/shm.h"),
    ("cython/core/x.c", '#include "providers/shm/shm.h"', "includes cython/providers/shm/shm.h"),
    ("cython/core/x.c", '#include "providers/providers.def"', "includes cython/providers/providers.def"),
    ("cython/include/hr/x.h", '#include "core/engine.h"', "includes cython/core/engine.h"),
    ("hrdma/log.py", "\n" * LONGEST_FILE, f"{LONGEST_FILE + 1} lines"),
]
SOUND = {
    "hrdma/__init__.py": "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from hrdma.runtime import init\n",
    "hrdma/communicator.py": "from hrdma import _core\nfrom hrdma.planning import plan\nimport numpy as np\n",
    "hrdma/control/__init__.py": "import zmq\n",
    "hrdma/examples/x.py": "import hrdma\nfrom hrdma import init\n",
    "topo/schedule.py": "import numpy\nfrom hrdma.types import OPS\nfrom hrdma.topo import program\n",
    "cython/include/hr/hr.h": "",
    "cython/core/engine.h": '#include "hr/hr.h"\n#include <stdint.h>\n',
    "cython/core/registry.c": '#include "providers/providers.def"\n',
    "cython/providers/providers.def": "",
    "cython/providers/shm/shm.h": '#include "hr/hr.h"\n',
    "cython/providers/shm/shm.c": '#include "shm.h"\n#include "providers/shm/shm.h"\n',
    "cython/bind/errors.pxi": "from hrdma.errors import PeerError\nfrom libc.errno cimport errno\n",
}


def grow(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def problems_in(root: Path) -> list[str]:
    return [problem for check in CHECKS for problem in check(root)]


def test_a_sound_tree_passes(tmp_path):
    grow(tmp_path, SOUND)
    assert problems_in(tmp_path) == []


@pytest.mark.parametrize(("name", "text", "expected"), SABOTAGE, ids=lambda value: value[:40].strip())
def test_sabotage_is_caught(tmp_path, name, text, expected):
    grow(tmp_path, SOUND | {name: text + "\n"})
    problems = problems_in(tmp_path)
    assert len(problems) == 1, problems
    assert problems[0].startswith(name)
    assert expected in problems[0]
