"""Load the app that ``-A`` names, with ``-b`` and the other options applied."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from bulltask.app import App
from bulltask.cli.import_errors import reporting_import_errors
from bulltask.config.urls import SecretUrl
from bulltask.registry.tasks import add_to_import_path, find_app

__all__ = ["load_app", "load_app_or_broker", "load_tasks"]


def load_app(ctx: click.Context, app: str | None, broker: SecretUrl | None) -> tuple[str, App]:
    """Find the app and apply ``-b``.

    Args:
        ctx: The command's context; its ``obj`` holds the options that were given before the command.
        app: ``-A`` as given after the command.
        broker: ``-b`` as given after the command.

    Returns:
        The value of ``-A`` that was used, and the app. The value is empty if the app runs the command itself
        (``app.start()``).

    Raises:
        click.UsageError: No ``-A`` was given.
        AppNotFoundError: ``-A`` does not name an app.
        click.ClickException: A module of the app raised an error.
    """
    group_options: dict[str, Any] = ctx.obj or {}
    given: str | App | None = app or group_options.get("app")
    if not given:
        raise click.UsageError("no app: pass -A pkg.mod:name, or set BULLTASK_APP")
    if group_options.get("workdir"):
        os.chdir(group_options["workdir"])
    add_to_import_path()
    if isinstance(given, App):
        spec, loaded = "", given
    else:
        spec = given
        with reporting_import_errors(f"the app {spec!r} (-A)"):
            loaded = find_app(spec, App)
    if url := broker or group_options.get("broker"):
        loaded.conf.override("broker_url", url)
    return spec, loaded


def load_tasks(ctx: click.Context, options: Mapping[str, Any]) -> tuple[str, App]:
    """Return what :func:`load_app` returns for the values of ``app_options``, with all tasks imported."""
    spec, app = load_app(ctx, options["app"], options["broker"])
    with reporting_import_errors(f"the tasks of the app {spec!r}"):
        app._load_tasks()
    return spec, app


def load_app_or_broker(ctx: click.Context, options: Mapping[str, Any]) -> App:
    """Return the app that ``-A`` names; without ``-A``, an app for the server of ``-b``, without tasks.

    Such an app suffices for commands on queues and jobs.

    Args:
        ctx: The command's context.
        options: The values of :func:`bulltask.cli.options.redis_options`.
    """
    group_options: dict[str, Any] = ctx.obj or {}
    if options["app"] or group_options.get("app"):
        app = load_app(ctx, options["app"], options["broker"])[1]
    else:
        app = App(f"bulltask {ctx.info_name}")
        if url := options["broker"] or group_options.get("broker"):
            app.conf.override("broker_url", url)
    if options["prefix"] is not None:
        app.conf.override("prefix", options["prefix"])
    if options["hash_tag"] is not None:
        app.conf.override("queue_hash_tag", options["hash_tag"])
    return app
