"""Groups of commands that change the machine's network: what the kernel or the user's rights do not permit, in one line."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["EXIT_FAILED", "Privileged"]

EXIT_FAILED = 1
EXIT_NOT_ROOT = 126


class Privileged(click.Group):
    """Ends with 126 where rights are missing, with 1 after other errors of the command."""

    def invoke(self, ctx: click.Context) -> Any:
        from hrdma.errors import RefusedError

        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):  # which are RuntimeErrors
            raise
        except (OSError, RuntimeError) as error:
            text = error.strerror if isinstance(error, PermissionError) and error.strerror else str(error)
            click.echo(f"hrdma {self.name}: {text}", err=True)
            ctx.exit(EXIT_NOT_ROOT if isinstance(error, (PermissionError, RefusedError)) else EXIT_FAILED)
