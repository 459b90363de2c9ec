"""hrdma inside other frameworks. Third-party imports live here only; see README.md."""
