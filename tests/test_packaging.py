"""What is installed: the map of packages, the wheel, the source archive, the editable install."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = {"hrdma": "hrdma", "topo": "hrdma/topo", "qos": "hrdma/qos"}


def modules():
    """Every module of the tree under the name that it is to be installed by."""
    found = set()
    for folder, home in HOMES.items():
        for path in (ROOT / folder).rglob("*.py"):
            found.add(str(home / path.relative_to(ROOT / folder)))
    return found


def run(*command, cwd, **how):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, **how)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tree without what is built, so that nothing is built in the tree."""
    target = tmp_path_factory.mktemp("tree") / "hrdma"
    skip = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", "_core.c", ".*_cache"
    )
    shutil.copytree(ROOT, target, ignore=skip)
    return target


def test_no_package_shadows_cython():
    assert not (ROOT / "cython" / "__init__.py").exists()


def test_one_version():
    import hrdma

    texts = [path.read_text() for path in (ROOT / "setup.py", ROOT / "pyproject.toml")]
    assert all(hrdma.__version__ not in text for text in texts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_source_archive_and_wheel(copy, tmp_path):
    """The wheel is built from the archive, so the archive holds all that the build needs."""
    run(sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "-o", str(tmp_path), cwd=copy)
    (wheel,) = tmp_path.glob("*.whl")
    (archive,) = tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert modules() <= names, sorted(modules() - names)
    assert {"hrdma/py.typed", "hrdma/_core.pyi"} <= names
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"hrdma"}
    assert sum(name.endswith(".so") for name in names) == 1
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert {"cython/_core.pyx", "cython/include/hr/hr.h", "tests/harness.py"} <= packed
    assert not any(name.endswith((".so", ".pyc", "cython/_core.c")) for name in packed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_editable_install(copy, tmp_path):
    """The default editable install finds the mapped packages, in the tree, under one name each."""
    target = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(target), cwd=tmp_path)
    python = str(target / "bin" / "python")
    # The environment of this interpreter may be one itself; what it has, but for hrdma, is shown to the new one.
    (here,) = target.glob("lib/python3*/site-packages")
    for path in [Path(path) for path in sys.path if path.endswith("site-packages")]:
        for entry in path.iterdir():
            if "hrdma" not in entry.name and not (here / entry.name).exists():
                (here / entry.name).symlink_to(entry)
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", ".", cwd=copy)
    probe = "import hrdma.topo.schedule as s, hrdma._core as c, hrdma; print(s.__file__, c.__file__, hrdma.init().size)"
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    schedule, core, size = run(python, "-c", probe, cwd=tmp_path, env=clean).split()
    assert schedule == str(copy / "topo" / "schedule.py")
    assert core.startswith(str(copy))
    assert size == "1"
