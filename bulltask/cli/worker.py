"""``bulltask worker``: run a worker."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import click

from bulltask.cli.app_loader import load_app, reporting_import_errors
from bulltask.cli.options import app_options
from bulltask.config.config import SETTINGS
from bulltask.config.parsers import parse_names
from bulltask.config.urls import SecretUrl
from bulltask.jobs.errors import check_installed
from bulltask.jobs.names import check_queue_name
from bulltask.registry.tasks import add_to_import_path

__all__ = ["worker"]

F = TypeVar("F", bound=Callable[..., Any])


def setting_options(function: F) -> F:
    """Add the options that settings declare. One that is not given does not change its setting."""
    for declared in reversed([*SETTINGS.values()]):
        if declared.flag is None:
            continue
        kind = declared.flag.type
        function = click.option(
            *declared.flag.names.split(),
            declared.name,
            type=click.Choice(kind, case_sensitive=False) if isinstance(kind, tuple) else kind,
            is_flag=kind is bool,
            default=None,
            metavar=declared.flag.metavar,
            help=declared.flag.help,
        )(function)
    return function


@click.command("worker", short_help="Run a worker.")
@app_options
@click.option(
    "-Q",
    "--queues",
    help="Queues to process, comma-separated (default: task_queues, or those of the app's tasks and routes).",
)
@click.option("-X", "--exclude-queues", help="Queues not to process, comma-separated.")
@click.option("-I", "--include", help="Modules with tasks to import, comma-separated, in addition to the app's.")
@click.option("--burst", is_flag=True, help="Stop when no job in the queues can run now.")
@click.option(
    "--max-jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after N jobs have been started and have finished.",
)
@click.option("--reload", is_flag=True, help="Restart when a Python file changes. For development.")
@setting_options
@click.pass_context
def worker(
    ctx: click.Context,
    /,
    *,
    app: str | None,
    broker: SecretUrl | None,
    queues: str | None,
    exclude_queues: str | None,
    include: str | None,
    burst: bool,
    max_jobs: int | None,
    reload: bool,
    **settings: Any,
) -> None:
    """Run a worker: a supervisor and its child processes.

    TERM and Ctrl-C stop the worker after its running jobs have finished (warm shutdown). QUIT kills its child
    processes and releases their jobs (cold shutdown).
    """
    if sys.platform == "win32":
        raise click.ClickException(
            "a worker does not run on Windows, because it forks: run it in WSL 2 or in a Linux container; programs on "
            "Windows can send to it"
        )
    if reload and os.environ.get(_RELOADER) != str(os.getppid()):
        ctx.exit(_Reloader().run(_watched(ctx, app)))
    gc.disable()  # a collection during these imports would free nothing, and take a tenth of the time
    from bulltask.worker.child_pool import limit_native_threads  # noqa: PLC0415
    from bulltask.worker.run import StopConditions, default_queues, run_worker  # noqa: PLC0415 - imported late, so that --help is fast
    from bulltask.worker.supervisor import ProcessSpec  # noqa: PLC0415

    gc.freeze()  # nor would later ones free anything of these modules: the one before the first fork takes 2 ms, not 20
    gc.enable()
    process_spec = ProcessSpec()  # before the app is imported
    limit_native_threads()
    app_spec, loaded_app = load_app(ctx, app, broker)
    for name, value in settings.items():
        if value is not None:
            loaded_app.conf.override(name, value)
    if include:
        loaded_app.conf.override(
            "include", [*parse_names(loaded_app.conf.include, "include"), *parse_names(include, "-I")]
        )
    with reporting_import_errors("the modules with tasks (-I, include, imports, autodiscover_tasks)"):
        loaded_app._load_tasks()
    excluded = _queues(exclude_queues, "-X")
    processed = [name for name in (_queues(queues, "-Q") or default_queues(loaded_app)) if name not in excluded]
    if not processed:
        raise click.UsageError("no queue to process: -X excludes all of them")
    until = StopConditions(burst=burst, max_jobs=max_jobs)
    ctx.exit(run_worker(loaded_app, processed, app_spec=app_spec or None, process_spec=process_spec, until=until))


def _queues(text: str | None, flag: str) -> tuple[str, ...]:
    return tuple(map(check_queue_name, parse_names(text or "", flag)))


# ---- --reload -------------------------------------------------------------------------------------------------------

_RELOADER: Final = "_BULLTASK_RELOADER"
"""In the environment of the worker: the process that watches the files. The worker itself has ``--reload``, too."""
_POLL_MS: Final = 200
_STOP: Final = frozenset({"SIGTERM", "SIGINT", "SIGQUIT"})
_FORWARDED: Final = _STOP | {"SIGHUP", "SIGTSTP", "SIGCONT", "SIGTTIN", "SIGTTOU", "SIGUSR1", "SIGUSR2"}
_OF_TERMINAL: Final = frozenset({"SIGINT", "SIGQUIT", "SIGTSTP"})


class _Reloader:
    """Runs this command in another process, and restarts the worker when a Python file changes.

    A change has the effect of ``HUP``: running jobs may finish. A worker that cannot import the new code exits, and
    starts again after the next change. Signals to this process are forwarded to the worker.
    """

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._reported = False

    def run(self, directories: Sequence[str]) -> int:
        """Run until the worker stops; return its exit code."""
        check_installed("watchfiles", "reload", "--reload")
        from watchfiles import PythonFilter, watch  # noqa: PLC0415 - an optional dependency

        for name in _FORWARDED:
            signal.signal(getattr(signal, name), self._forward)
        click.echo(f"Restarts when a Python file changes in {', '.join(directories)}", err=True)
        watched = watch(*directories, watch_filter=PythonFilter(), rust_timeout=_POLL_MS, yield_on_timeout=True)
        next(watched)  # first, so that no change is missed
        self._start()
        return next(code for changes in watched if (code := self._turn(changes)) is not None)

    def _turn(self, changes: set[tuple[Any, str]]) -> int | None:
        """Start or restart the worker if necessary; return the exit code if it is to end."""
        assert self._worker is not None
        code = self._worker.poll()
        if code is None:
            if changes and not self._stopped:
                changed = sorted({os.path.relpath(path) for _, path in changes})
                click.echo(f"Restarting, because of a change: {', '.join(changed[:3])}", err=True)
                self._worker.send_signal(signal.SIGHUP)
        elif self._stopped or code in {0, click.UsageError.exit_code}:
            return code if code >= 0 else 128 - code
        elif changes:
            self._start()
        elif not self._reported:
            self._reported = True
            click.echo(f"The worker exited with code {code}: it starts again when a Python file changes", err=True)
        return None

    def _start(self) -> None:
        self._reported = False
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # until the worker handles it
        try:
            command = [sys.executable, *sys.orig_argv[1:]]
            self._worker = subprocess.Popen(command, env={**os.environ, _RELOADER: str(os.getpid())})  # noqa: S603
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        if self._stopped:  # the signal came before the process
            self._worker.terminate()

    def _forward(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._stopped = self._stopped or name in _STOP
        # The terminal sends it to the worker itself: twice, it would kill running jobs.
        if self._worker is not None and not (name in _OF_TERMINAL and _is_in_foreground()):
            self._worker.send_signal(number)


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # not a terminal
        return False


def _watched(ctx: click.Context, app: str | None) -> list[str]:
    """Return the working directory, and the app's if it is another one."""
    options: dict[str, Any] = ctx.obj or {}
    directory = Path(options.get("workdir") or ".").resolve()
    directories, spec = [directory], app or options.get("app")
    if isinstance(spec, str):
        add_to_import_path(str(directory))
        package = re.split("[.:]", spec)[0]
        found = None if package in sys.modules else importlib.util.find_spec(package)  # imports nothing
        if found is not None and found.origin is not None:
            module = Path(found.origin).resolve().parent
            directories += [] if module.is_relative_to(directory) else [module]
    return [str(path) for path in directories]
