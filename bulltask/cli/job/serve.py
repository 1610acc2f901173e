"""``bulltask job serve``: the history as JSON, for dashboards on this machine."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Final

import click

from bulltask.cli.job.options import lake_option

__all__ = ["command"]

_ENDS: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@click.command("serve")
@lake_option(required=True)
@click.option("--port", type=click.IntRange(0, 65_535), default=3001, show_default=True, help="TCP port on 127.0.0.1.")
def command(*, lake: Path, port: int) -> None:
    """Answer questions about the lake as JSON over HTTP, until Ctrl-C.

    It listens on 127.0.0.1 only, and everybody on this machine may ask: /search, /job, /counts, /rate, /latency.
    """
    from bulltask.lake import History  # noqa: PLC0415 - slow
    from bulltask.lake.serving import HistoryServer  # noqa: PLC0415 - slow

    history = History(lake)
    # Blocked before there are threads, which inherit it: whoever asks this process to end is heard below.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        with HistoryServer(history, port) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            click.echo(f"history: {server.url} answers from {lake}")
            signal.sigwait(_ENDS)
            server.shutdown()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
