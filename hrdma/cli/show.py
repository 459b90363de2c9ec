"""Tables and texts on the terminal, or in a pipe as wide as is usual."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["show"]

PIPED_WIDTH = 120  # where neither a terminal nor COLUMNS says


def show(*parts: RenderableType) -> None:
    """Prints what rich makes of them, without blanks at the ends of lines."""
    from rich.console import Console

    fixed = sys.stdout.isatty() or os.environ.get("COLUMNS")
    console = Console(width=None if fixed else PIPED_WIDTH, highlight=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
