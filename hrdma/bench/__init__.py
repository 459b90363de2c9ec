"""Benchmarks that verify what they measure: `hrdma bench`. Rows carry medians over rounds and the number of wrong elements."""
