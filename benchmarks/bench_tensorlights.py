"""TensorLights on one machine: parameter-server jobs behind NICs of limited rate, FIFO beside TLs-One and TLs-RR.

    python benchmarks/bench_tensorlights.py --quick                       the two ends: all servers on one host, and all apart
    python benchmarks/bench_tensorlights.py [--ratio 0.5 1 2] [--placements 12 6,6 4,4,4] [--json F] [--svg F]
    python benchmarks/bench_tensorlights.py --quick --transport gloo      the same jobs over Gloo, as it is

Needs root. Hosts are namespaces around one switch (`hrdma.lab`), with links of the same rate both ways. A job is one server and some workers,
processes that use this library's send and recv: the server sends its model to every worker, each one sleeps in place of computing
and sends as much back. Servers' hosts have a controller (`hrdma.qos`), with which all ranks there register, as the library does by itself;
FIFO is its policy ``fifo``, so that all policies shape alike. Where a host has no server nothing is ordered. With --servers-only workers do
not register, as in the published experiments: what they send from a host with a controller is nobody's there, and goes last.

Over Gloo (torch.distributed, `peers/tensorlights_rank.py`) servers are started with `hrdma qos run`, which puts the sockets of any
program in its job's band; nothing else is different. It is installed by the first run.

How long a worker computes is fixed before anything is measured, from the published set-up (21 jobs of 20 workers, ResNet-32): all
servers on one host were about 1.75 times as slow as all apart, where one is bound by the NIC (21 fan-outs a step) and the
other by computing and two fan-outs: c + 2 f = 21 f / 1.75, so c = 10 f, 10/21 of what all jobs' fan-outs take. Here it is 10/21 of
that too (ratio 1), and half and twice that. Jobs start 0.1 s apart where the published step took 0.64 s; the rotation's interval
is two steps here, and was some thirty there, of runs a thousand times as long.

Under the table stands what was published, and the same of here. Columns: average and slowest completion time of the jobs (the stagger of their starts left out), what the average is beside FIFO, the same by
a model of links without delay, loss and windows (`tensorlights_fluid`), how long a worker that has its model waits for the last one of
its job to have it, and the use of the busiest server's link.

--floor is what a job gets of its server's link in any band. What it answers to its workers goes before all bands, unless --no-answers:
then the way back idles while it starves.

References: X. S. Huang, A. Chen, T. S. E. Ng, "Green, Yellow, Yield: End-Host Traffic Scheduling for Distributed Deep
Learning with TensorLights", HPBDC 2019.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beside import environments
from objects_groups import PACKAGES
from peers.tensorlights_rank import Ended, Work, steps
from tensorlights_fluid import completion
from tensorlights_picture import draw

from hrdma.lab import namespaces
from hrdma.lab.lab import Lab
from hrdma.lab.traffic import check_wires
from hrdma.qos.client import socket_path
from hrdma.qos.controller import Controller
from hrdma.qos.policy import Job, Policy
from hrdma.topo.fabrics import parse
from hrdma.units import in_bytes, rate_value

COMPUTE = 10 / 21  # of the time that all fan-outs take
STAGGER = 0.1 / 0.64  # of the same
STEPS_A_TURN = 2.0
ON_THE_WIRE = 1514 / 1448  # frames' bytes beside a message's
NOISE = 0.1  # of the time to compute, either way
POLICIES = ("fifo", "tls-one", "tls-rr")
LIMIT = 300.0  # seconds for one run
PEERS = Path(__file__).with_name("peers")


@dataclass(frozen=True)
class Setup:
    """What all policies are measured with."""

    jobs: int
    workers: int
    nbytes: int  #: of a model
    rate: int  #: bytes per second of a link
    steps: int
    ratio: float
    placement: tuple[int, ...]  #: servers on each of the first hosts
    floor: int  #: bytes per second that a job has in any band
    answers: bool = True  #: bare acknowledgements and the library's answers go before all bands
    servers_only: bool = False  #: workers on hosts of servers do not register

    @property
    def fan_outs(self) -> float:
        """Seconds in which one link carries all jobs' models to all workers."""
        return self.jobs * self.workers * self.nbytes / self.rate

    @property
    def compute(self) -> float:
        return self.ratio * COMPUTE * self.fan_outs

    @property
    def interval(self) -> float:
        """Seconds between rotations."""
        return max(0.1, STEPS_A_TURN * self.fan_outs)

    @property
    def servers(self) -> list[int]:
        """The host of each job's server."""
        return [host for host, count in enumerate(self.placement) for _ in range(count)]

    def work(self, job: int, rank: int) -> Work:
        delay = job * STAGGER * self.fan_outs
        return Work(job, rank, self.workers, self.nbytes, self.steps, self.compute, NOISE, delay, LIMIT)

    def predicted(self, policy: str) -> list[float]:
        """Completion times by the fluid model."""
        return completion(policy, self.servers, self.workers, self.steps, transfer=ON_THE_WIRE * self.nbytes / self.rate,
                          compute=self.compute, stagger=STAGGER * self.fan_outs, noise=NOISE, interval=self.interval)  # fmt: skip

    def hosts_of(self, job: int) -> list[int]:
        """The server's host, and the workers' on other hosts."""
        server = self.servers[job]
        others = [host for host in range(self.jobs) if host != server]
        random.Random(job).shuffle(others)
        return [server, *(others[i % len(others)] for i in range(self.workers))]


@dataclass
class Result:
    """Of one run."""

    placement: str
    ratio: float
    policy: str
    completion: list[float]  #: seconds, by job
    wait: float  #: seconds, mean over steps and workers
    utilisation: float
    predicted: list[float]  #: completion by the fluid model
    carried: dict[str, int]  #: bytes between ranks by provider


# --- what runs in children ---


def over_hrdma(work: Work, ready: int, go: int, result: Path) -> None:
    import hrdma

    with hrdma.init() as comm:
        model = hrdma.zeros(work.nbytes, "uint8")
        gradients = [hrdma.zeros(work.nbytes, "uint8") for _ in range(work.workers if work.rank == 0 else 0)]
        comm.barrier()
        os.write(ready, b"1")
        os.read(go, 1)

        def send(what: Any, to: int, tag: int) -> Ended:
            request = comm.isend(what, to, tag)
            return lambda: request.wait(LIMIT)

        def receive(what: Any, source: int, tag: int) -> Ended:
            request = comm.irecv(what, source, tag)
            return lambda: request.wait(LIMIT)

        found = steps(work, model, gradients, send, receive)
        found["carried"] = check_wires(comm)  # fails where shared memory joins hosts
        result.write_text(json.dumps(found))
        comm.barrier()


def over_gloo(python: Path, work: Work, ready: int, go: int, result: Path, band: Sequence[str]) -> None:
    """Becomes a program that knows nothing of bands; `band` are the words that start one in a job's."""
    pipes = [f"/proc/{os.getppid()}/fd/{pipe}" for pipe in (ready, go)]
    command = [*band, str(python), str(PEERS / "tensorlights_rank.py"), json.dumps(asdict(work)), *pipes, str(result)]
    os.execv(command[0], command)


def controller_main(dev: str, policy: Policy, directory: str, ready: int) -> None:
    with Controller(dev, policy, directory=directory, replace_root=True) as controller:
        os.write(ready, b"1")
        controller.run()
        controller.control.revert()


def child(file: str, main: Callable[[], None], environment: dict[str, str]) -> int:
    """A process in a namespace; this one has no threads and no engine, so a fork is as good as a start."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(environment)
        namespaces.enter(file)
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def children() -> Iterator[list[int]]:
    """Their numbers; those that are left at the end are killed."""
    pids: list[int] = []
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def ended(pids: list[int], deadline: float) -> None:
    """Waits until all have ended well."""
    while pids:
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(pids)} processes have not ended within {LIMIT:g} s")
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pids.remove(pid)
                if status:
                    raise SystemExit(f"a process ended with status {status}; see above")
        time.sleep(0.05)


def take(pipe: int, count: int, deadline: float) -> None:
    """Waits until so many children are ready."""
    for _ in range(count):
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise SystemExit("a process is not ready in time; see above")
        os.read(pipe, 1)


# --- a run ---


def run(lab: Lab, setup: Setup, name: str, directory: str, gloo: Path | None) -> Result:
    """One policy; over Gloo where its interpreter is given."""
    policy = Policy(name, tuple(Job(f"job{job}") for job in range(setup.jobs)), rate=setup.rate,
                    floor=setup.floor, interval=setup.interval, dscp_pool=tuple(range(8, 8 + setup.jobs)),
                    **({} if setup.answers else {"acks": 0, "answer_pool": ()}))  # fmt: skip
    dev = lab.nodes[0]["nics"][0]["name"]
    ready, tell = os.pipe()
    hold, go = os.pipe()
    deadline = time.monotonic() + LIMIT
    with children() as controllers, children() as ranks:
        for host in range(len(setup.placement)):
            serve = lambda: controller_main(dev, policy, directory, tell)  # noqa: E731
            controllers.append(child(lab.namespace(host), serve, {}))
        take(ready, len(controllers), deadline)
        files = {}
        for job in range(setup.jobs):
            hosts = setup.hosts_of(job)
            for rank, host in enumerate(hosts):
                namespace = lab.namespace(host)
                path = namespaces.inside(namespace, lambda: socket_path(dev, directory))
                registers = host < len(setup.placement) and not (rank and setup.servers_only)
                environment = {
                    "RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": lab.addresses(hosts[0])[0],
                    "MASTER_PORT": str(29600 + job), "HRDMA_TOKEN": "bench", "HRDMA_TIMEOUT": str(LIMIT),
                    "HRDMA_HEARTBEAT": "60", "HRDMA_JOB": f"job{job}", "HRDMA_QOS": path if registers else "off",
                    "HRDMA_TCP": os.environ.get("HRDMA_TCP", "cc=system"),  # as for ranks of a lab
                    "GLOO_SOCKET_IFNAME": dev, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
                }  # fmt: skip
                run_in_band = f"-m hrdma qos run --dev={dev} --job=job{job} --state".split()
                band = [sys.executable, *run_in_band, directory, "--"]
                files[job, rank] = Path(directory, f"{job}.{rank}")
                files[job, rank].unlink(missing_ok=True)
                work = setup.work(job, rank)

                def main(
                    work: Work = work, file: Path = files[job, rank], band: Sequence[str] = band if registers else ()
                ) -> None:
                    if gloo:
                        over_gloo(gloo, work, tell, hold, file, band)
                    else:
                        over_hrdma(work, tell, hold, file)

                ranks.append(child(namespace, main, environment))
        take(ready, len(ranks), deadline)
        before = [sent(lab, host) for host in range(len(setup.placement))]
        os.write(go, bytes(len(ranks)))
        ended(ranks, deadline)
        moved = max(sent(lab, host) - start for host, start in enumerate(before))
        for pid in controllers:
            os.kill(pid, signal.SIGTERM)
        ended(controllers, deadline)
    for end in (ready, tell, hold, go):
        os.close(end)
    found = {key: json.loads(file.read_text()) for key, file in files.items()}
    servers = [found[job, 0] for job in range(setup.jobs)]
    makespan = max(one["start"] + one["took"] for one in servers) - min(one["start"] for one in servers)
    waits = []
    for job in range(setup.jobs):
        for each in zip(*(found[job, rank]["arrivals"] for rank in range(1, setup.workers + 1))):
            waits += [max(each) - arrival for arrival in each]
    placement = ",".join(map(str, setup.placement))
    took = [one["took"] for one in servers]
    use = moved / makespan / setup.rate
    carried: Counter[str] = Counter()
    for job in range(setup.jobs):
        carried.update(found[job, 0]["carried"])  # a server's peers are all of its workers
    return Result(placement, setup.ratio, name, took, statistics.mean(waits), use, setup.predicted(name), dict(carried))


def sent(lab: Lab, host: int) -> int:
    """Bytes that a host's link has carried away."""
    dev = lab.nodes[host]["nics"][0]["name"]
    return namespaces.inside(
        lab.namespace(host), lambda: int(Path("/proc/thread-self/net/dev").read_text().split(f"{dev}:")[1].split()[8])
    )


def show(results: Sequence[Result]) -> None:
    head = f"{'servers on hosts':18}{'ratio':>6} {'policy':9}{'average s':>10}{'slowest s':>10}{'beside FIFO':>12}{'model':>8}"
    print(f"\n{head}{'wait ms':>9}{'link':>6}")
    for placement, ratio in dict.fromkeys((one.placement, one.ratio) for one in results):
        these = [one for one in results if (one.placement, one.ratio) == (placement, ratio)]
        model = {one.policy: statistics.mean(one.predicted) for one in these}
        averages = {name: [statistics.mean(one.completion) for one in these if one.policy == name] for name in POLICIES}
        for name in POLICIES:
            ours = [one for one in these if one.policy == name]
            average, fifo = statistics.median(averages[name]), statistics.median(averages["fifo"])
            slowest = statistics.median(max(one.completion) for one in ours)
            wait = statistics.median(one.wait for one in ours) * 1e3
            use = statistics.median(one.utilisation for one in ours)
            print(f"{placement:18}{ratio:6g} {name:9}{average:10.2f}{slowest:10.2f}{average / fifo - 1:+12.1%}"
                  f"{model[name] / model['fifo'] - 1:+8.1%}"
                  f"{wait:9.0f}{use:6.0%}", flush=True)  # fmt: skip
        sums = sum((Counter(one.carried) for one in these), Counter[str]())
        print(
            "carried by "
            + ", ".join(f"{name} {in_bytes(n)}" for name, n in sums.items())
            + "; nothing between hosts by shm"
        )


def beside_published(results: Sequence[Result]) -> None:
    """What is known of the published results, and the same measured here: medians over rounds, at ratio 1."""
    rounds: dict[tuple[str, str], list[float]] = {}
    for one in results:
        if one.ratio == 1.0:
            rounds.setdefault((one.placement, one.policy), []).append(statistics.mean(one.completion))
    average = {case: statistics.median(values) for case, values in rounds.items()}
    placements = list(dict.fromkeys(placement for placement, _ in average))
    if len(placements) < 2:
        return
    most, least = max(placements, key=largest), min(placements, key=largest)

    def gains(placement: str) -> str:
        fifo = average[placement, "fifo"]
        return ", ".join(f"{name} {average[placement, name] / fifo - 1:+.0%}" for name in POLICIES[1:])

    slower = average[most, "fifo"] / average[least, "fifo"] - 1
    rows = [
        (f"average beside FIFO, servers on hosts {most}", "up to -31%", gains(most)),
        (f"average beside FIFO, servers on hosts {least}", "about none", gains(least)),
        (f"FIFO, {most} beside {least}", "about +75%", f"{slower:+.0%}"),
    ]
    print(f"\n{'':58}{'published':12}here")
    for what, published, here in rows:
        print(f"{what:58}{published:12}{here}")


def largest(placement: str) -> int:
    """Servers on the fullest host."""
    return max(map(int, placement.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--model", type=int, default=131_072, help="bytes")
    parser.add_argument("--rate", default="40mbit", help="of every link")
    parser.add_argument("--floor", default="100kbit", help="of every job at its server's link; as published")
    parser.add_argument("--no-answers", action="store_true", help="they stay in their job's band")
    parser.add_argument("--servers-only", action="store_true", help="workers do not register, as published")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=1, help="policies take turns")
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--placements", nargs="+", default=["12", "6,6", "4,4,4", ",".join(12 * "1")], metavar="N,N...",
                        help="servers on each host, one for each job; ratios are tried on the first")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the first and the last placement at ratio 1, 8 steps")
    parser.add_argument(
        "--transport", choices=("hrdma", "gloo"), default="hrdma", help="gloo: as it is, by `hrdma qos run`"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.ratio, options.steps = [1.0], 8
        options.placements = [options.placements[0], options.placements[-1]]
    placements = [tuple(map(int, text.split(","))) for text in options.placements]
    jobs = sum(placements[0])
    for placement in placements:
        if sum(placement) != jobs or min(placement) < 1:
            parser.error(f"--placements {placement}: the first places the servers of {jobs} jobs")
    # Ratios are about the placement that contends most; the others are run at the published one.
    cases = [(placements[0], ratio) for ratio in options.ratio] + [(place, 1.0) for place in placements[1:]]
    try:
        folder = environments.environment("gloo", PACKAGES["gloo"], print) if options.transport == "gloo" else None
    except environments.Unavailable as error:
        raise SystemExit(f"gloo: {error}") from None
    gloo = folder and folder / "bin" / "python"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # takes the lab down on the way out
    rate, results = rate_value(options.rate), []
    with tempfile.TemporaryDirectory() as directory, \
            Lab.up(parse(f"star:{jobs}", rate=options.rate, latency=0), f"tls-{os.getpid()}") as lab:  # fmt: skip
        os.environ["HRDMA_CACHE_DIR"] = directory
        for place, ratio in cases:
            setup = Setup(jobs, options.workers, options.model, rate, options.steps, ratio, place,
                          rate_value(options.floor), not options.no_answers, options.servers_only)  # fmt: skip
            print(f"# over {options.transport}: {setup.jobs} jobs of {setup.workers} workers, {setup.nbytes} bytes, links of {options.rate}, floor"
                  f" {options.floor}, {setup.steps} steps, servers {place}; ratio {ratio:g}: {setup.compute:.3f} s computing beside {setup.fan_outs:.3f} s of"
                  f" all fan-outs, starts {STAGGER * setup.fan_outs:.3f} s apart", flush=True)  # fmt: skip
            for _ in range(options.rounds):
                for name in POLICIES:
                    results.append(run(lab, setup, name, directory, gloo))
                    print(f"# {name}: {statistics.mean(results[-1].completion):.2f} s on average", flush=True)
            show([one for one in results if (one.placement, one.ratio) == (",".join(map(str, place)), ratio)])
    print("\nall:")
    show(results)
    beside_published(results)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    if options.svg:
        options.svg.write_text(draw([asdict(one) for one in results], POLICIES))


if __name__ == "__main__":
    main()
