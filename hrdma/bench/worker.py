"""What every rank of `hrdma bench` runs: measures each size in rounds, verifies it, and prints on rank 0."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hrdma.bench.cases import CASES, Case, pattern, reduced
from hrdma.bench.sizes import sizes

if TYPE_CHECKING:
    import numpy as np

    from hrdma.communicator import Communicator

__all__ = ["Row", "main", "measure"]

TARGET_SECONDS = 0.2  # of one round, where the iterations are not given
COLUMNS = "#{:>12} {:>12} {:>9} {:>6} {:>5} {:>12} {:>18} {:>9} {:>9} {:>7}"


@dataclass(frozen=True)
class Row:
    """One size. Times in microseconds (median, least and largest round), bandwidths in 1e9 bytes per second."""

    size: int
    count: int
    type: str
    redop: str
    root: int
    time_us: float
    min_us: float
    max_us: float
    algbw: float
    busbw: float
    wrong: int
    iters: int


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hrdma bench")
    parser.add_argument("case")
    for name in ("begin", "end", "factor", "iters", "warmup", "rounds", "root"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("dtype", "op", "memory", "json-path"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args(argv)


def _dtype(name: str) -> np.dtype:
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _buffer(count: int, dtype: np.dtype, memory: str) -> np.ndarray:
    import numpy as np

    import hrdma

    return hrdma.empty(count, dtype) if memory == "registered" else np.empty(count, dtype)


def _time(comm: Communicator, case: Case, x: np.ndarray, out: np.ndarray, how: Any, iters: int) -> float:
    """Seconds per iteration, of the slowest rank."""
    import numpy as np

    comm.barrier()
    begin = time.perf_counter()
    for _ in range(iters):
        case.call(comm, x, out, how)
    elapsed = np.array([time.perf_counter() - begin])
    comm.allreduce(elapsed, "max")
    return float(elapsed[0]) / iters


def _iterations(comm: Communicator, case: Case, x: np.ndarray, out: np.ndarray, how: Any) -> int:
    for _ in range(how.warmup):
        case.call(comm, x, out, how)
    if how.iters:
        return how.iters
    once = _time(comm, case, x, out, how, 3)
    return max(3, min(20000, int(TARGET_SECONDS / max(once, 1e-7))))


def _verify(comm: Communicator, case: Case, x: np.ndarray, out: np.ndarray, how: Any, dtype: np.dtype) -> int:
    """Runs it once more on known values; wrong elements over all ranks."""
    import numpy as np

    n, rank = comm.size, comm.rank
    op = how.op if case.reduces else "sum"
    x[:] = pattern(0, x.size, rank, dtype, op)
    if not case.in_place:
        out[:] = 0
    case.call(comm, x, out, how)
    expected: np.ndarray | None
    share = (out if case.recv_shares else x).size
    if case.name == "allreduce":
        expected, got = reduced(0, x.size, n, dtype, op), x
    elif case.name == "reduce":
        expected, got = (reduced(0, x.size, n, dtype, op) if rank == how.root else None), out
    elif case.name == "broadcast":
        expected, got = pattern(0, x.size, how.root, dtype), x
    elif case.name in ("allgather", "gather"):
        wanted = case.name == "allgather" or rank == how.root
        expected = np.concatenate([pattern(0, share, peer, dtype) for peer in range(n)]) if wanted else None
        got = out
    elif case.name == "reduce_scatter":
        expected, got = reduced(share * rank, share, n, dtype, op), out
    elif case.name == "scatter":
        expected, got = pattern(share * rank, share, how.root, dtype), out
    elif case.name == "alltoall":
        share = x.size // n
        expected = np.concatenate([pattern(share * rank, share, peer, dtype) for peer in range(n)])
        got = out
    else:
        receives = case.name == "pingpong" or rank == 1
        expected, got = (pattern(0, x.size, 1 - rank, dtype) if receives else None), out
    wrong = np.array([0 if expected is None else int(np.count_nonzero(got != expected))], np.int64)
    comm.allreduce(wrong, "sum")
    return int(wrong[0])


def measure(comm: Communicator, case: Case, size: int, how: Any) -> Row:
    """Measures one size.

    Parameters
    ----------
    size : int
        Bytes of the larger buffer of a rank; rounded down to whole shares.
    how : namespace
        The options of the command.
    """
    dtype = _dtype(how.dtype)
    n = comm.size
    shared = case.send_shares or case.recv_shares or case.name == "alltoall"
    count = size // dtype.itemsize
    if shared:
        count -= count % n
    x = _buffer(count // n if case.send_shares else count, dtype, how.memory)
    out = x if case.in_place else _buffer(count // n if case.recv_shares else count, dtype, how.memory)
    x[:] = 0
    out[:] = 0
    iters = _iterations(comm, case, x, out, how)
    seconds = [_time(comm, case, x, out, how, iters) for _ in range(how.rounds)]
    if case.name == "pingpong":
        seconds = [value / 2 for value in seconds]  # one way
    wrong = _verify(comm, case, x, out, how, dtype) if how.check else -1
    median = statistics.median(seconds)
    nbytes = count * dtype.itemsize
    algbw = nbytes / median / 1e9
    return Row(
        size=nbytes,
        count=count,
        type=how.dtype,
        redop=how.op if case.reduces else "none",
        root=how.root if case.rooted else -1,
        time_us=median * 1e6,
        min_us=min(seconds) * 1e6,
        max_us=max(seconds) * 1e6,
        algbw=algbw,
        busbw=algbw * case.factor(n),
        wrong=wrong,
        iters=iters,
    )


def _print_head(comm: Communicator, case: Case, how: Any) -> None:
    transports = sorted({name for peer, name in comm.info()["transports"].items() if peer != comm.rank}) or ["loop"]
    print(f"# {case.name}, {comm.size} ranks over {' and '.join(transports)}, {how.memory} memory, median of {how.rounds} rounds")
    print(COLUMNS.format("size", "count", "type", "redop", "root", "time", "min..max", "algbw", "busbw", "#wrong"))
    print(COLUMNS.format("(B)", "(elements)", "", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", ""), flush=True)


def _print_row(row: Row) -> None:
    spread = f"{row.min_us:.2f}..{row.max_us:.2f}"
    wrong = "N/A" if row.wrong < 0 else str(row.wrong)
    text = COLUMNS.format(
        row.size, row.count, row.type, row.redop, row.root, f"{row.time_us:.2f}", spread, f"{row.algbw:.3f}", f"{row.busbw:.3f}", wrong
    )
    print(" " + text[1:], flush=True)


def main(argv: list[str]) -> int:
    """Runs a benchmark on the job of this process; 0, or 1 when a result was wrong."""
    how = _arguments(argv)
    import hrdma

    case = CASES[how.case]
    with hrdma.init() as comm:
        if case.pair and comm.size != 2:
            raise SystemExit(f"hrdma bench: {case.name} is between 2 ranks, this job has {comm.size}")
        if how.root >= comm.size:
            raise SystemExit(f"hrdma bench: root {how.root} is not below the number of ranks, {comm.size}")
        rows = []
        only_json = how.json_path == "-"
        show = comm.rank == 0 and not only_json
        if show:
            _print_head(comm, case, how)
        for size in sizes(how.begin, how.end, how.factor):
            row = measure(comm, case, size, how)
            rows.append(row)
            if show:
                _print_row(row)
        wrong = sum(max(row.wrong, 0) for row in rows)
        if comm.rank == 0:
            average = sum(row.busbw for row in rows) / len(rows)
            document = {"case": case.name, "ranks": comm.size, "memory": how.memory, "rows": [asdict(row) for row in rows],
                        "average_busbw": average, "wrong": wrong}  # fmt: skip
            if show:
                print(f"# average bus bandwidth {average:.3f} GB/s, {'not checked' if not how.check else f'{wrong} wrong'}")
            if only_json:
                print(json.dumps(document, indent=2))
            elif how.json_path:
                with open(how.json_path, "w") as file:
                    json.dump(document, file, indent=2)
        return 1 if wrong else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
