"""A group of commands, each of them loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

import click

from bulltask.errors import BulltaskError

__all__ = ["LazyGroup"]

_EXTRAS: Final = {"pyarrow": "history", "jinja2": "report", "numpy": "spark", "pyspark": "spark", "py4j": "spark"}
"""Packages that are installed separately, and the smallest extra that has them."""


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is used, so that ``--help`` stays quick.

    Args:
        modules: for each command, the module whose ``command`` it is.
        attrs: as for ``click.Group``.
    """

    def __init__(self, *, modules: Mapping[str, str], **attrs: Any) -> None:
        super().__init__(**attrs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names of all commands."""
        return sorted(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Load one command."""
        module = self._modules.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run; an error of bulltask's own is one line for the user, not a traceback."""
        try:
            return super().invoke(ctx)
        except BulltaskError as exc:
            raise click.ClickException(str(exc)) from exc
        except ModuleNotFoundError as exc:
            if (extra := _EXTRAS.get((exc.name or "").partition(".")[0])) is None:
                raise
            raise click.ClickException(f"this needs {exc.name}: pip install 'bulltask[{extra}]'") from exc
