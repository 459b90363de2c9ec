"""The example that `make demo` runs, end to end; and that its proof can fail."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from commands import hrdma

import harness

pytestmark = pytest.mark.slow
digits = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install hrdma[demo]"
)
MODULE = "hrdma.examples.train_digits"


def train(n: int, *arguments: str, **environ: str):
    return hrdma("run", "-n", str(n), "-m", MODULE, *arguments, **environ)


@digits
@pytest.mark.parametrize("n, transport", [(2, "shm"), *((4, transport) for transport in harness.transports())])
def test_train_digits(n, transport):
    done = train(n, HRDMA_TRANSPORT=transport, **harness.devices(transport))
    assert done.returncode == 0 and done.stderr == "", done
    lines = done.stdout.splitlines()
    assert all(line.startswith("[0] ") for line in lines)
    assert sum("epoch" in line and "loss" in line for line in lines) == 8
    accuracy = re.search(r"test accuracy (0\.\d+) on 360", done.stdout)
    assert accuracy and float(accuracy[1]) > 0.95
    assert f"parameters of all {n} ranks are bit-identical" in done.stdout
    rows = [line.split()[1:] for line in lines if re.match(r"\[0\] (rank \d|all) ", line)]
    assert len(rows) == n
    assert all(row[2] == transport for row in rows[:-1])
    assert sum(float(row[3]) + float(row[5]) for row in rows[:-1]) > 10 and sum(int(row[7]) for row in rows[:-1]) > 880
    whole = re.search(r"all +880 allreduces of 28\.8 kB .* ([\d.]+) of ([\d.]+) s +([\d.]+) GB/s", done.stdout)
    assert whole and 0 < float(whole[1]) <= float(whole[2]) < 20 and float(whole[3]) > 0


def learn(rank, arguments):
    from hrdma.examples import train_digits

    sys.argv[1:] = arguments
    return train_digits.main()


@digits
@pytest.mark.parametrize("n", [1, 3, 8])
def test_other_numbers_of_ranks_learn_as_well(n):
    done = harness.outcomes(learn, n, init=False, arguments=["--epochs", "10"])
    assert all(one.value == 0 for one in done) and "bit-identical" in done[0].output, done


@digits
def test_too_little_training_is_a_failure():
    (done,) = harness.outcomes(learn, 1, init=False, arguments=["--epochs", "1", "--rate", "0.0001"])
    assert done.value == 1 and "bit-identical" in done.output


@digits
def test_a_batch_that_cannot_be_shared_is_refused():
    done = train(2, "--batch", "1")
    assert done.returncode == 2 and "--batch 1: between 2, the ranks, and 1437, the samples" in done.stderr


def compare(comm, spoilt):
    from hrdma.examples.train_digits import same_everywhere

    theta = np.arange(1000, dtype=np.float32)
    if comm.rank == spoilt:
        theta.view(np.uint32)[777] ^= 1
    return same_everywhere(comm, theta)[0]


def test_one_bit_on_one_rank_is_noticed_on_all():
    assert harness.ranks(compare, 3, spoilt=-1) == [True] * 3
    assert not any(harness.ranks(compare, 3, spoilt=0)) and not any(harness.ranks(compare, 3, spoilt=2))
