"""A command group that imports a command on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

import click

from bulltask.jobs.errors import BulltaskError

__all__ = ["LazyGroup"]

_EXTRAS: Final = {"pyarrow": "history", "jinja2": "report", "numpy": "spark", "pyspark": "spark", "py4j": "spark"}
"""Optional packages, each with the smallest extra that installs it."""


class LazyGroup(click.Group):
    """A click group that imports a command's module only when the command is used, so that ``--help`` stays quick.

    Args:
        modules: The module of each command; its attribute ``command`` is the command.
        attrs: Arguments of ``click.Group``.
    """

    def __init__(self, *, modules: Mapping[str, str], **attrs: Any) -> None:
        super().__init__(**attrs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of all commands."""
        return sorted(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Import a command; return ``None`` for an unknown name."""
        module = self._modules.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; print bulltask's errors as one line, without a traceback."""
        try:
            return super().invoke(ctx)
        except BulltaskError as exc:
            from bulltask.cli.terminal import safe  # noqa: PLC0415 - only for an error

            raise click.ClickException(safe(str(exc))) from exc
        except ModuleNotFoundError as exc:
            if (extra := _EXTRAS.get((exc.name or "").partition(".")[0])) is None:
                raise
            raise click.ClickException(f"{exc.name} is not installed: pip install 'bulltask[{extra}]'") from exc
