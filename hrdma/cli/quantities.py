"""Options that are a number with its unit: what `click` calls a type, one for each kind."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["RATE", "SIZE", "TIME"]


class _Quantity(click.ParamType):
    """Bit/s, bytes or seconds, as a float."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from hrdma.topo.fabrics import latency_s, rate_bit_s
        from hrdma.units import size_value

        try:
            return float({"rate": rate_bit_s, "size": size_value, "time": latency_s}[self.name](value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


RATE = _Quantity("rate")
SIZE = _Quantity("size")
TIME = _Quantity("time")
