"""What every rank of `hrdma bench` runs: joins the job, measures each size, prints on rank 0.

    python -m hrdma.bench.worker '{"case": "allreduce", "end": 65536}'

The argument holds the options that differ from the defaults of `hrdma.bench.options.Options`. It starts quickly:
neither click nor rich is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hrdma.bench.options import Options

if TYPE_CHECKING:
    from hrdma.communicator import Communicator

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(options: Options) -> int:
    """Runs a benchmark on the job of this process.

    Returns
    -------
    int
        Exit code, the same on all ranks unless one of them failed: 0; 1 a result was wrong or the transport failed;
        2 the options do not fit the job; 130 interrupted.
    """
    import hrdma

    who = ""
    try:
        try:
            comm = hrdma.init()
        except ValueError as error:
            _complain(str(error))
            return EXIT_USAGE
        with comm:
            who = f"rank {comm.rank}: "
            try:
                options.validate(comm.size)
            except ValueError as error:
                if comm.rank == 0:
                    _complain(str(error))
                comm.barrier()  # none leaves while others are still joining
                return EXIT_USAGE
            return _run(comm, options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (hrdma.HrdmaError, TimeoutError, MemoryError, OSError) as error:
        _complain(f"{who}{error}")
        return EXIT_FAILED


def _run(comm: Communicator, options: Options) -> int:
    from hrdma.bench import report
    from hrdma.bench.measure import Bench
    from hrdma.bench.sizes import counts, show_size
    from hrdma.bench.values import dtype_of

    comm.deterministic = options.deterministic
    first = comm.rank == 0
    found = comm.info()["transports"]
    transports = sorted({name for peer, name in found.items() if peer != comm.rank}) or ["loop"]
    if first and not options.json:
        print(report.head(options, comm.size, transports), flush=True)
    rows = []
    case = options.pattern
    with report.Progress(first and options.progress) as progress:
        bench = Bench(comm, options, progress)
        for dtype, op in options.kinds():
            itemsize = dtype_of(dtype).itemsize
            shares = comm.size if case.shared else 1
            steps: Iterable[int] = counts(options.begin, options.end, options.factor, itemsize, shares)
            if not case.moves:
                steps = (0,)
            for count in steps:
                progress.begin(f"{case.name} {dtype} {show_size(count * itemsize)}")
                row = bench.measure(count, dtype, op)
                rows.append(row)
                if first and not options.json:
                    print(report.line(row), flush=True)
    if first:
        show = report.document(options, comm.size, transports, rows) if options.json else report.foot(rows)
        print(show, flush=True)
    return EXIT_FAILED if any(row.wrong > 0 for row in rows) else 0


def _complain(text: str) -> None:
    sys.stderr.write(f"hrdma bench: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(Options.from_json(sys.argv[1])))
