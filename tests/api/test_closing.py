"""The transport is closed while somebody else is inside of it."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from nursery import environment

import harness
import hrdma

CLOSED_MEANWHILE = """
import resource, sys, threading
from hrdma import _core
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # an engine that somebody is inside of is left as it is
sys.setswitchinterval(1e-6)
for _ in range(300):
    engine, go = _core.Engine(0, "loop"), threading.Event()
    def lose():
        go.set()
        while not engine.closed:
            engine.peer_lost(1, "gone")
    threads = [threading.Thread(target=lose) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.wait()
    engine.close(0.0)
    for thread in threads:
        thread.join()
"""


def test_an_engine_is_closed_while_the_control_plane_tells_it_of_a_loss():
    """The control plane's thread is inside, or about to be, when init fails and closes it at once."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CLOSED_MEANWHILE], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()


def finalized_by_a_signal(rank):
    said = []
    for wait in (lambda comm, x: comm.recv(x, 0, timeout=20), lambda comm, x: comm.irecv(x, 0).wait()):
        comm = hrdma.init(0, 1)
        signal.signal(signal.SIGALRM, lambda *_: hrdma.finalize())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            wait(comm, np.zeros(1))
        except hrdma.RequestError as error:
            said.append(str(error))
    return said


def test_a_signal_handler_may_finalize_what_the_thread_waits_in():
    (said,) = harness.ranks(finalized_by_a_signal, 1, init=False)
    assert [text.partition(" with rank 0: ")[::2] for text in said] == [
        ("recv #0", "the communicator was closed meanwhile"),
        ("irecv #0", "the communicator was closed meanwhile"),
    ]


ENDS = """
import numpy, hrdma
comm = hrdma.init()
other, registered, plain = comm.dup(), hrdma.zeros(100_000, "float32"), numpy.ones(100_000, "float32")
comm.allreduce(registered)
done = other.allreduce(plain, async_op=True)
endpoint = hrdma.Endpoint(comm, (comm.rank + 1) % comm.size)
memory = endpoint.expose(registered)
never = comm.irecv(numpy.zeros(1), (comm.rank + 1) % comm.size, tag=1)
done.wait()
comm.barrier()
"""


@pytest.mark.parametrize("transport", harness.transports())
def test_an_interpreter_ends_that_still_holds_everything(transport):
    """Ranks of other tests leave before it would take itself apart (`zygote.leave`)."""
    env = environment() | harness.devices(transport) | {"HRDMA_TRANSPORT": transport, "HRDMA_TIMEOUT": "20"}
    command = [sys.executable, "-m", "hrdma", "run", "-n", "2", "--timeout", "30"]
    command += ["--", sys.executable, "-X", "faulthandler", "-c", ENDS]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
