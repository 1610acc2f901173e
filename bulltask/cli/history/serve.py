"""``bulltask history serve``: serve the history as JSON, for dashboards on this machine."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Final

import click

from bulltask.cli.options import job_lake_option

__all__ = ["command"]

_STOP_SIGNALS: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


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
    # Blocked before threads start, because they inherit the mask and the signal must reach sigwait below.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        with HistoryServer(history, port) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            click.echo(f"history: {server.url} serves {lake}")
            signal.sigwait(_STOP_SIGNALS)
            server.shutdown()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
