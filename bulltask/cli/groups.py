"""Groups of commands: imported on first use, with "did you mean" and hints for Celery's names.

A command or option that does not exist is answered with the command that does the same, or the reason why there is
none. :data:`CELERY_COMMANDS` and :data:`CELERY_OPTIONS` are what Celery's users type.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

import click

from bulltask.jobs.errors import BrokerAuthError, BulltaskError

__all__ = ["CELERY_COMMANDS", "CELERY_OPTIONS", "HintGroup", "LazyGroup"]

CELERY_COMMANDS: Final = {
    "amqp": "queues are in Redis; 'bulltask queues' lists them",
    "beat": "workers run schedules themselves, so there is no beat process; 'bulltask schedule list' shows them",
    "flower": "use 'bulltask dashboard' or 'bulltask top', or 'bulltask queues', 'bulltask workers', 'bulltask jobs'",
    "graph": "'bulltask job tree ID' shows a flow with the states of its jobs",
    "list": "there are no bindings; 'bulltask queues' lists the queues",
    "logtool": "log lines are JSON, with the job's id and the task's name; use a tool like jq",
    "migrate": "to copy jobs to another server, use Redis' replication; 'bulltask migrate-bull' converts Bull's queues",
    "multi": "run each worker as a service of systemd or as a container; 'bulltask worker -c N' has N child processes",
    "purge": "use 'bulltask queue drain QUEUE'",
    "status": "use 'bulltask workers'",
    "upgrade": "bulltask accepts Celery's settings by their lowercase names; nothing needs to be converted",
}
"""What to use instead of those of Celery's commands that have another name in bulltask, or none."""

CELERY_OPTIONS: Final = {
    "-O": "bulltask has only one scheduling strategy, which is fair",
    "--camera": "'bulltask pipeline' records events in tables",
    "--dump": "'bulltask events' prints them",
    "--prefetch-multiplier": "use the setting worker_prefetch",
    "--purge": "use 'bulltask queue drain QUEUE' before you start the worker",
    "--result-backend": "results are stored in the Redis server of -b",
    "--statedb": "revocations are stored in Redis",
    **dict.fromkeys(("-B", "--beat"), "every worker runs the schedules in beat_schedule; there is no beat process"),
    **dict.fromkeys(
        ("-S", "-s", "--schedule", "--scheduler"), "schedules are in Redis; 'bulltask schedule list' shows them"
    ),
    **dict.fromkeys(("-E", "--task-events"), "events are always on"),
    **dict.fromkeys(
        ("-f", "--logfile"),
        "log lines are written to stderr; redirect it, or read it with systemd or the container engine",
    ),
    **dict.fromkeys(
        ("-D", "--detach", "--gid", "--pidfile", "--uid", "--umask"),
        "use a service manager, such as systemd, or a container",
    ),
    **dict.fromkeys(
        ("--without-gossip", "--without-heartbeat", "--without-mingle"),
        "workers do not talk to each other, so there is nothing to switch off",
    ),
}
"""What to use instead of Celery's options that bulltask does not have."""

_PATH: Final = "bulltask.cli.path"
"""The key in Click's ``meta`` of the command's name, with the names of its groups."""

_ROLES: Final = {
    "migrate-bull": "manager",
    "outbox": "sender",
    "worker": "worker",
    **dict.fromkeys(("call", "control", "inspect", "job", "jobs", "queue", "revoke", "schedule"), "operator"),
    **dict.fromkeys(("job logs", "job show", "job tree", "schedule list", "schedule show"), "reader"),
}
"""The roles of :data:`bulltask.transport.permissions.ROLES` that commands need; the others need ``reader``."""

_EXTRAS: Final = {
    "deltalake": "history",
    "jinja2": "report",
    "numpy": "spark",
    "py4j": "spark",
    "pyarrow": "history",
    "pyspark": "spark",
    "textual": "top",
    "uvicorn": "dashboard",
}
"""Optional packages, each with the smallest extra that installs it."""


class HintGroup(click.Group):
    """A group that answers an unknown command with its hint, or else with the most similar commands.

    Args:
        hints: Texts by the names of commands that do not exist, such as Celery's.
        attrs: Click's arguments.
    """

    def __init__(self, *args: Any, hints: Mapping[str, str] | None = None, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self._hints = hints or {}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names; raise a ``UsageError`` with a hint for an unknown one."""
        name = args[0]
        ctx.meta[_PATH] = f"{ctx.meta.get(_PATH, '')} {name}".strip()
        if name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        close = get_close_matches(name, known)
        if hint := self._hints.get(name):
            advice = hint
        elif close:
            advice = f"did you mean {' or '.join(map(repr, close))}?"
        else:
            advice = f"use {', '.join(known)}"
        raise click.UsageError(f"no command {name!r} of '{ctx.command_path}': {advice}", ctx)


class LazyGroup(HintGroup):
    """A group that imports a command's module (``module:attribute``) only when the command is used.

    It reports the errors of its commands in one line, without a traceback.
    """

    def __init__(self, *, places: Mapping[str, str], **attrs: Any) -> None:
        super().__init__(**attrs)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of all commands."""
        return sorted(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Import a command; return ``None`` for an unknown name."""
        if (place := self._places.get(cmd_name)) is None:
            return None
        module, _, attribute = place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            raise _with_hint(exc, ctx) from exc

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; print bulltask's errors as one line, without a traceback."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as exc:
            raise _with_hint(exc, ctx) from exc
        except BulltaskError as exc:
            from bulltask.cli.terminal import safe  # noqa: PLC0415 - only for an error

            raise click.ClickException(safe(f"{exc}{_role_hint(exc, ctx.meta.get(_PATH, ''))}")) from exc
        except ModuleNotFoundError as exc:
            if (extra := _EXTRAS.get((exc.name or "").partition(".")[0])) is None:
                raise
            raise click.ClickException(f"{exc.name} is not installed: pip install 'bulltask[{extra}]'") from exc


def _role_hint(error: BulltaskError, path: str) -> str:
    """Return the role that the command needs, if a permission is missing and the error does not name a role."""
    if not isinstance(error, BrokerAuthError) or error.handshake_failed or "bulltask acl" in str(error):
        return ""
    role = _ROLES.get(path) or _ROLES.get(path.split(" ", maxsplit=1)[0], "reader")
    return f". 'bulltask {path}' needs the role {role}: bulltask acl {role}"


def _with_hint(error: click.NoSuchOption, ctx: click.Context) -> click.UsageError:
    """Return the error for an unknown option, with a hint if it is one of Celery's."""
    if (hint := CELERY_OPTIONS.get(error.option_name)) is None:
        return error
    return click.UsageError(
        f"no option {error.option_name!r} of '{(error.ctx or ctx).command_path}': {hint}", error.ctx
    )
