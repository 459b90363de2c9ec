"""Benchmarks that verify what they measure: `hrdma bench`. What ranks run is `hrdma.bench.worker`."""
