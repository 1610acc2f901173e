"""``bulltask history serve``: serve the history as JSON, for dashboards on this machine."""

from __future__ import annotations

import threading
from pathlib import Path

import click

from bulltask.cli.options import job_lake_option
from bulltask.config.process import stop_signals

__all__ = ["command"]


@click.command("serve", short_help="Serve the history as JSON over HTTP.")
@job_lake_option(required=True)
@click.option("--port", type=click.IntRange(0, 65_535), default=3001, show_default=True, help="TCP port on 127.0.0.1.")
def command(*, lake: Path, port: int) -> None:
    """Serve the lake's history as JSON over HTTP until Ctrl-C.

    It listens on 127.0.0.1 only, without authentication, so any user on this machine can read it. Paths: /search,
    /job, /job-counts, /attempt-counts, /latency.
    """
    from bulltask.lake import History  # noqa: PLC0415 - slow
    from bulltask.lake.serving import HistoryServer  # noqa: PLC0415 - slow

    history = History(lake)
    with stop_signals(hangup=True) as wait_for_stop, HistoryServer(history, port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        click.echo(f"history: {server.url} serves {lake}")
        wait_for_stop()
        server.shutdown()
