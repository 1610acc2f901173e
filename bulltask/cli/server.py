"""``bulltask server``: run a Valkey or Redis server in the foreground, for development."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from bulltask.cli.terminal import safe
from bulltask.embedded.server import (
    EmbeddedServer,
    PortTakenError,
    ServerLog,
    find_binary,
    find_listener,
    pick_port,
)
from bulltask.embedded.shared import DataDirectory, find_project, start_and_record
from bulltask.jobs.errors import BrokerUnavailableError

__all__ = ["server"]


@click.command("server", short_help="Run a Valkey or Redis server for development.")
@click.option("--port", type=click.IntRange(1, 65535), default=6379, show_default=True, help="TCP port on 127.0.0.1.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the data.  [default: that of the current project, as for embedded://]",
)
@click.option(
    "--loglevel",
    type=click.Choice(["debug", "verbose", "notice", "warning"]),
    default="notice",
    show_default=True,
    help="The server's log level, for server.log.",
)
def server(port: int, data_dir: Path | None, loglevel: str) -> None:
    """Run a Valkey (or Redis) server for development until Ctrl-C.

    It listens on 127.0.0.1 only and keeps its data between runs. Apps of the project in the current directory with
    broker_url="embedded://" use it.
    """
    users = f"the apps of {find_project()} with embedded:// use it; " if data_dir is None else ""
    try:
        started = _start(port, DataDirectory.of_project() if data_dir is None else DataDirectory.at(data_dir), loglevel)
    except PortTakenError:
        other = find_listener(port)
        join = f", or use that server: broker_url redis://127.0.0.1:{port}/0" if other.is_server else ""
        raise click.ClickException(
            safe(f"port {port} is in use by {other.text}: choose another port, --port {pick_port()}{join}")
        ) from None
    except BrokerUnavailableError as error:
        raise click.ClickException(str(error)) from error
    log = ServerLog(started.data_dir)
    click.echo(
        f"{started.binary} ({started.binary.path}) listening on {started.url} (pid {started.pid}); "
        f"{users}data in {started.data_dir}, append-only file synced every second; press Ctrl-C to stop it"
    )
    _wait_for_end(started)
    if not started.running:
        raise click.ClickException(safe(f"the server stopped unexpectedly: {log.tail()}"))
    started.stop()


def _start(port: int, data: DataDirectory, loglevel: str) -> EmbeddedServer:
    binary = find_binary()
    for other in data.newer_directories(binary):
        click.echo(
            f"note: {binary} starts without data, because it cannot read the newer data of another server in {other}",
            err=True,
        )
    started = EmbeddedServer(data.directory(binary), port=port, binary=binary, extra=["--loglevel", loglevel])
    start_and_record(started, data)
    return started


def _wait_for_end(started: EmbeddedServer) -> None:
    """Wait until the server has exited or this process receives a signal to stop."""
    # The signals stay blocked, because a second Ctrl-C must not interrupt the shutdown, which has a time limit.
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    while started.running and signal.sigwait(numbers) is signal.SIGCHLD:
        pass  # SIGCHLD: the server has exited, or was stopped and continued
