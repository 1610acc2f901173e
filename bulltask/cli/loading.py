"""``-A`` and ``-b``: the options of every command that needs the app."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from bulltask.app import App
from bulltask.registry.discovery import find_app, work_in

__all__ = ["app_options", "load_app"]

F = TypeVar("F", bound=Callable[..., Any])


def app_options(function: F) -> F:
    """Give a command ``-A`` and ``-b``, so that they may also stand after its name."""
    function = click.option("-b", "--broker", help="Redis URL; wins over the app's own.")(function)
    return click.option("-A", "--app", help="The app: pkg.mod:name, pkg.mod or pkg.")(function)


def load_app(ctx: click.Context, app: str | None, broker: str | None) -> tuple[str, App]:
    """Find the app and apply ``-b``; return what ``-A`` said too.

    Raises:
        click.UsageError: no ``-A`` was given.
        AppNotFound: it did not lead to an app.
    """
    given: dict[str, Any] = ctx.obj or {}
    spec = app or given.get("app")
    if not spec:
        raise click.UsageError("which app? Say -A pkg.mod:name (or set BULLTASK_APP)")
    if given.get("workdir"):
        os.chdir(given["workdir"])
    work_in()
    found = find_app(spec, App)
    if url := broker or given.get("broker"):
        found.conf.override("broker_url", url)
    return spec, found
