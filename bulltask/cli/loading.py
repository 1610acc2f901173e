"""``-A`` and ``-b``: the options of every command that needs the app."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from bulltask.app import App
from bulltask.cli.broker import broker_option
from bulltask.config.urls import SecretUrl
from bulltask.registry.discovery import find_app, work_in

__all__ = ["app_options", "load_app", "some_app"]

F = TypeVar("F", bound=Callable[..., Any])


def app_options(function: F) -> F:
    """Give a command ``-A`` and ``-b``, so that they may also stand after its name."""
    return click.option("-A", "--app", help="The app: pkg.mod:name, pkg.mod or pkg.")(broker_option(function))


def load_app(ctx: click.Context, app: str | None, broker: SecretUrl | None) -> tuple[str, App]:
    """Find the app and apply ``-b``; return what ``-A`` said too.

    Raises:
        click.UsageError: no ``-A`` was given.
        AppNotFoundError: it did not lead to an app.
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


def some_app(ctx: click.Context, given: Mapping[str, Any]) -> App:
    """The app of ``-A``; without one, an app of no tasks at ``-b``, for commands that only need a server.

    Args:
        ctx: the command's.
        given: what it was given for :func:`bulltask.cli.pipeline.options.redis_options`.
    """
    around: dict[str, Any] = ctx.obj or {}
    if given["app"] or around.get("app"):
        app = load_app(ctx, given["app"], given["broker"])[1]
    else:
        app = App(f"bulltask {ctx.info_name}")
        if url := given["broker"] or around.get("broker"):
            app.conf.override("broker_url", url)
    if given["prefix"] is not None:
        app.conf.override("prefix", given["prefix"])
    if given["hash_tag"] is not None:
        app.conf.override("queue_hash_tag", given["hash_tag"])
    return app
