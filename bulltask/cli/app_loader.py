"""Load the app that ``-A`` names, with ``-b`` and the other options applied.

An error in the user's modules becomes one message: the error, and the lines of their code that led to it. Commands
begin with :func:`load_tasks`, or with :func:`load_app_or_broker` if ``-b`` alone suffices.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.app import App
from bulltask.cli.options import ExitCode
from bulltask.cli.terminal import safe
from bulltask.config.urls import SecretUrl, redact_text
from bulltask.jobs.errors import AppNotFoundError
from bulltask.jobs.names import bullmq_name
from bulltask.registry.tasks import add_to_import_path, find_app
from bulltask.transport.call import QueueKeys, command

if TYPE_CHECKING:
    from bulltask.queue import Queue

__all__ = [
    "NotFoundError",
    "existing_keys",
    "existing_queue",
    "import_tasks",
    "load_app",
    "load_app_or_broker",
    "load_tasks",
    "own_command",
    "reporting_import_errors",
]

_PACKAGE: Final = f"{Path(__file__).parent.parent}{os.sep}"
_IMPORT_SYSTEM: Final = ("<frozen", f"{Path(importlib.__file__).parent}{os.sep}")
_MAX_LINES: Final = 8


def load_app(ctx: click.Context, app: str | None, broker: SecretUrl | None) -> tuple[str, App]:
    """Return the ``-A`` that was used, and its app with ``-b``; ``app`` and ``broker`` were given after the command.

    Options that were given before the command are in ``ctx.obj``. The first value is empty if the app runs the command
    itself (``app.start()``). An error in the app's modules becomes a ``click.ClickException``.
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
    import_tasks(app, spec)
    return spec, app


def import_tasks(app: App, spec: object) -> None:
    """Import the tasks of an app that is loaded; ``spec`` is the ``-A`` that was used, or the app itself."""
    with reporting_import_errors(f"the tasks of the app {spec if isinstance(spec, str) else ''!r}"):
        app._load_tasks()


def load_app_or_broker(ctx: click.Context, options: Mapping[str, Any]) -> App:
    """Return the app that ``-A`` names; without ``-A``, an app for the server of ``-b``, without tasks.

    Such an app suffices for commands on queues and jobs. ``options`` are those of
    :func:`bulltask.cli.options.redis_options`.
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


def own_command(line: str, ctx: click.Context, options: Mapping[str, Any]) -> str:
    """Return a command line of bulltask for the app and server of this command, which may be typed as it is."""
    given = {**(ctx.obj or {})}
    spec, broker = options["app"] or given.get("app"), options["broker"] or given.get("broker")
    words = ["-A", quote(spec)] if isinstance(spec, str) else []
    words += ["-b", quote(str(broker))] if broker else []
    prefix, tag = options["prefix"], options["hash_tag"]
    of_prefix = [] if prefix is None else ["--prefix", quote(prefix)]
    of_tag = [] if tag is None else ["--queue-hash-tag" if tag else "--no-queue-hash-tag"]
    before, _, rest = line.partition("bulltask ")
    if rest.startswith(("worker ", "migrate-bull ")):  # they have no such options
        rest = rest.replace(" -A APP", "", 1) if isinstance(spec, str) else rest
        if tag is not None and "HASH_TAG" not in before and rest.startswith("worker "):
            before += f"BULLTASK_QUEUE_HASH_TAG={str(tag).lower()} "
        before += "" if prefix is None else f"BULLTASK_PREFIX={quote(prefix)} "
    else:
        rest = " ".join([rest, *of_prefix, *([] if "hash-tag" in rest else of_tag)])
    return " ".join([f"{before}bulltask", *words, rest])


class NotFoundError(click.ClickException):
    """A job, queue or schedule does not exist."""

    exit_code = ExitCode.NOT_FOUND


def existing_queue(app: App, name: str) -> Queue:
    """Return a queue; raises :class:`NotFoundError` if Redis has no queue with this name.

    If the other form of its keys exists, with or without a hash tag, the error says which option to use.
    """
    config, queue = app._config, app.queue(name)
    keys = queue.context.keys
    tagged = not config.queue_hash_tag
    other = QueueKeys(config.prefix, bullmq_name(name, hash_tag=tagged))
    found = existing_keys(app, {key: its.name for its in (keys, other) for key in _keys_of(its)})
    if keys.name in found:
        return queue
    where = f"no queue {keys.name!r} in Redis at {app._broker.endpoint.safe_url} with prefix {config.prefix!r}"
    if found:
        where += f", but {other.name!r} exists: use {'--queue-hash-tag' if tagged else '--no-queue-hash-tag'}"
    raise NotFoundError(safe(where))


def existing_keys(app: App, keys: Mapping[str, str]) -> list[str]:
    """Return the names in ``keys`` of those keys that exist."""
    # Each key by itself: in a cluster, those of a queue without a hash tag are on several nodes.
    calls = [command("EXISTS", key, parse_reply=bool) for key in keys]
    found = app._broker.pool.run_many(calls) if calls else []
    return list(compress(keys.values(), found))


def _keys_of(keys: QueueKeys) -> tuple[str, ...]:
    """Return keys of which a queue has at least one; ``meta`` may be missing, for example after a manual repair."""
    waiting = (keys.wait, keys.paused, keys.prioritized, keys.delayed, keys.waiting_children)
    return (keys.meta, *waiting, keys.active, keys.completed, keys.failed, keys.repeat, keys.events)


@contextmanager
def reporting_import_errors(what: str) -> Iterator[None]:
    """Turn an error in ``what`` into a message without the frames of bulltask and of Python's import system."""
    try:
        yield
    except (AppNotFoundError, click.ClickException):
        raise  # its message is complete
    except Exception as exc:
        raise click.ClickException(_describe(exc, what)) from exc


def _describe(exc: Exception, what: str) -> str:
    text = exc.msg if isinstance(exc, SyntaxError) else str(exc)
    lines = [f"cannot import {what}: {type(exc).__name__}{': ' if text else ''}{text}"]
    cause = exc.__cause__
    if cause is not None and str(cause) not in text:
        lines.append(f"  caused by {type(cause).__name__}: {cause}")
    frames = [
        f"  {_place(frame.filename, frame.lineno)}: {frame.line}"
        for frame in traceback.extract_tb(exc.__traceback__)
        if not frame.filename.startswith((_PACKAGE, *_IMPORT_SYSTEM))
    ]
    if isinstance(exc, SyntaxError) and exc.filename:
        frames.append(f"  {_place(exc.filename, exc.lineno)}: {(exc.text or '').strip()}")
    if len(frames) > _MAX_LINES:
        half = _MAX_LINES // 2
        frames[half:-half] = [f"  … {len(frames) - _MAX_LINES} more"]
    return redact_text("\n".join([*lines, *frames]))


def _place(filename: str, line: int | None) -> str:
    path = Path(filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line}"
