"""What users get: the source archive, the wheel built from it, the wheel in a fresh environment, the editable install."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hrdma

ROOT = Path(__file__).parent.parent
HOMES = {"hrdma": "hrdma", "topo": "hrdma/topo", "qos": "hrdma/qos"}  # folder -> place in the wheel
IMPORT_LIMIT = 0.4  # of what numpy takes; 0.2 was measured
# A compiler that optimises little, as nothing is measured here: the install that `make` made is from the same setup.py.
HASTY = """#!/bin/sh
case "$*" in
*_core.c*) exec cc "$@" -O0 ;;
*) exec cc "$@" -O1 ;;
esac
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Output of a command that must succeed; nothing of this tree is on its path. `env`: more of the environment."""
    removed = ("PYTHON", "HRDMA_", "RANK", "WORLD_SIZE", "MASTER_")
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if not key.startswith(removed)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done.stdout


def sources(*suffixes: str) -> set[str]:
    """Files of the Python packages of this tree, by their place in the wheel."""
    found = set()
    for folder, place in HOMES.items():
        if (ROOT / folder / "__init__.py").exists():
            paths = (path for path in (ROOT / folder).rglob("*") if path.name.endswith(suffixes))
            found |= {f"{place}/{path.relative_to(ROOT / folder)}" for path in paths}
    return found


@contextlib.contextmanager
def alone(tmp_path_factory, name: str) -> Iterator[Path]:
    """A folder of all workers of this test session, for one of them at a time."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> dict[str, Path]:
    """The source archive of a copy of this tree, and the wheel made from that archive and nothing else."""
    with alone(tmp_path_factory, "dist") as folder:
        if not list(folder.glob("*.whl")):
            shutil.rmtree(folder / "tree", ignore_errors=True)  # of a worker that failed
            built = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "_core.c")
            shutil.copytree(ROOT, folder / "tree", ignore=built)
            compiler = folder / "cc"
            compiler.write_text(HASTY)
            compiler.chmod(0o755)
            options = ("--no-isolation", "--skip-dependency-check", "--outdir", folder)
            run(sys.executable, "-m", "build", *options, folder / "tree", cwd=folder, CC=str(compiler))
    (archive,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return {"archive": archive, "wheel": wheel}


@pytest.fixture(scope="module")
def python(dist, tmp_path_factory) -> Path:
    """The interpreter of a fresh environment with the wheel, and the dependencies of the one that runs this test."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)  # pip is among the dependencies
    python = folder / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # A folder named in a .pth file comes last, and its own .pth files (the editable hrdma) are not read.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(site) / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    options = ("-q", "--no-deps", "--no-index", "--ignore-installed")  # which the editable hrdma is
    run(python, "-m", "pip", "install", *options, dist["wheel"], cwd=folder)
    return python


def test_archive_contents(dist):
    with tarfile.open(dist["archive"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kinds = {".py", ".pyi", ".pyx", ".pxi", ".pxd", ".c", ".h", ".def", ".sh"}
    paths = [path for folder in ("cython", "tests", "hrdma", "topo") for path in (ROOT / folder).rglob("*")]
    wanted = {str(path.relative_to(ROOT)) for path in paths if path.suffix in kinds and path.name != "_core.c"}
    assert wanted <= names, wanted - names
    by_hand = {"Makefile", "README.md", "LICENSE", "CHANGELOG.md", "tools/bootstrap", "tests/core/Makefile"}
    assert by_hand <= names, by_hand - names
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o", "/_core.c"))]


def test_wheel_contents(dist):
    """The packages, the types and one extension; no test, no C."""
    with zipfile.ZipFile(dist["wheel"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    extension = {name for name in names if re.fullmatch(r"hrdma/_core\.[^/]*\.so", name)}
    assert len(extension) == 1, names
    assert names - extension == sources(".py", ".pyi", "py.typed")


def test_every_module_can_be_imported(python, tmp_path):
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in sources(".py")}
    modules -= {"hrdma.__main__"}  # that one runs the command line
    modules = {
        name for name in modules if not name.startswith("hrdma.integrations.ray")
    }  # Ray is not installed with it
    script = tmp_path / "imports.py"
    script.write_text(
        "import importlib, sys, sysconfig\n"
        "for name in sys.argv[1:]:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__file__.startswith((sysconfig.get_path('platlib'), sysconfig.get_path('purelib'))), module\n"
    )
    run(python, script, "hrdma._core", *sorted(modules), cwd=tmp_path)


def test_two_ranks_from_an_unrelated_folder(python, tmp_path):
    (tmp_path / "job.py").write_text(
        "import numpy as np, hrdma\n"
        "with hrdma.init() as comm:\n"
        "    x = np.arange(1000, dtype='float32') * comm.size + comm.rank\n"
        "    comm.allreduce(x)\n"
        "    assert (x == np.arange(1000, dtype='float32') * 4 + 1).all(), x\n"
        "    print('rank', comm.rank, 'of', comm.size, 'is right', flush=True)\n"
    )
    output = run(python.with_name("hrdma"), "run", "-n", "2", "--timeout", "60", "job.py", cwd=tmp_path)
    assert "rank 0 of 2 is right" in output
    assert "rank 1 of 2 is right" in output


def test_the_examples_of_the_front_page(python, tmp_path):
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    ranks, one_sided, objects = examples
    for number, (size, text) in enumerate([("3", ranks), ("2", one_sided)]):
        (tmp_path / f"example{number}.py").write_text(text)
        run(python.with_name("hrdma"), "run", "-n", size, "--timeout", "60", f"example{number}.py", cwd=tmp_path)
    run(python, "-c", objects, cwd=tmp_path)


def test_info_of_the_wheel(python, tmp_path):
    output = run(python.with_name("hrdma"), "info", cwd=tmp_path)
    for provider in ("shm", "tcp", "loop"):
        assert re.search(rf"\b{provider}\b", output), output


def test_the_editable_install_is_this_tree(tmp_path):
    """`make` installed it; every module comes from here, under one name."""
    script = (
        "import hrdma._core, hrdma.topo.algorithms as a; print(hrdma.__file__, hrdma._core.__file__, a.__file__)\n"
        "try:\n    import topo\n"
        "except ModuleNotFoundError:\n    print('no topo')"
    )
    files, top = run(sys.executable, "-c", script, cwd=tmp_path).splitlines()
    folders = [str(Path(name).parent) for name in files.split()]
    homes = [str(ROOT / "hrdma"), str(ROOT / "hrdma"), str(ROOT / "topo" / "algorithms")]
    assert folders == homes, "run the tests by `make test`, which installs this tree"
    assert top == "no topo"


def test_the_version_is_written_once():
    texts = [path.read_text() for path in (ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "README.md")]
    assert not [text for text in texts if hrdma.__version__ in text]


def import_cost(statement: str, cwd: Path) -> float:
    """A statement's processor time over that of numpy's import just before it: the least of several."""
    script = f"""
from time import process_time
start = process_time()
import numpy
between = process_time()
{statement}
print((process_time() - between) / (between - start))
"""
    return min(float(run(sys.executable, "-c", script, cwd=cwd)) for _ in range(7))


@pytest.mark.parametrize("statement", ["import hrdma", "import hrdma; hrdma.init, hrdma.empty"])
def test_import_is_quick(statement, tmp_path):
    assert import_cost(statement, tmp_path) < IMPORT_LIMIT


def test_import_touches_little(tmp_path):
    """No file under /sys, and none of the packages that only the control plane and the command line need."""
    script = tmp_path / "listen.py"
    script.write_text(
        "import sys\n"
        "opened = []\n"
        "events = ('open', 'os.listdir', 'os.scandir')\n"
        "sys.addaudithook(lambda event, args: event in events and opened.append(str(args[0])))\n"
        "open('/sys/kernel/mm/transparent_hugepage/enabled').close() if sys.argv[1:] else None\n"
        "import hrdma\n"
        "bare = {name.partition('.')[0] for name in sys.modules}\n"
        "hrdma.init, hrdma.empty\n"
        "full = {name.partition('.')[0] for name in sys.modules}\n"
        "print([name for name in opened if name.startswith('/sys')])\n"
        "print(sorted(bare & {'numpy', 'zmq', 'click', 'rich'}), sorted(full & {'zmq', 'click', 'rich'}))\n"
    )
    assert run(sys.executable, script, cwd=tmp_path).splitlines() == ["[]", "[] []"]
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():  # the listener hears what it should
        assert "transparent_hugepage" in run(sys.executable, script, "open", cwd=tmp_path)
