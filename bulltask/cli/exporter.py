"""``bulltask exporter``: the metrics of all queues of a server, for one scraper, also without a worker."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.options import queues_option, redis_options
from bulltask.cli.terminal import echo
from bulltask.config.parsers import parse_names
from bulltask.jobs.clock import mono_s
from bulltask.jobs.names import name_in_app
from bulltask.queue.overview import find_queues, read_figures
from bulltask.transport.call import QueueKeys, SyncClient
from bulltask.transport.scripts.queue import QueueFigures

__all__ = ["exporter"]


MAX_QUEUES: Final = 1_000
"""Each queue takes about ten commands and twenty lines of a scrape."""
_SCAN_S: Final = 600
"""How often the keys are scanned for queues that only Node.js uses."""


@click.command("exporter", short_help="Serve the metrics of all queues for Prometheus.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind the port to.")
@click.option("--port", type=click.IntRange(0, 65_535), default=9_809, show_default=True, help="0: any free port.")
@click.option(
    "--cache", type=click.FloatRange(0), default=5.0, show_default=True, help="Read Redis at most this often (seconds)."
)
@queues_option
@redis_options
@click.pass_context
def exporter(ctx: click.Context, /, *, host: str, port: int, queues: str | None, cache: float, **options: Any) -> None:
    """Serve how full and how late the queues of a server are, until it is stopped.

    One exporter is enough for a server, and it needs no worker. It may use Redis as the role reader.
    """
    from bulltask.observe.metrics import QueuesCollector, bind, serve  # noqa: PLC0415 - not on Windows, and slow

    app = load_app_or_broker(ctx, options)
    reader = _Reader(app, None if queues is None else parse_names(queues, "-Q"))
    listener = bind(host, port)
    address, bound_port = listener.getsockname()[:2]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # process 1 of a container would ignore it
    echo(f"Serving metrics on http://{address}:{bound_port}/metrics")
    try:
        serve(listener, QueuesCollector(reader.read, lambda: reader.left_out, cache))
    except KeyboardInterrupt:
        ctx.exit(0)


class _Reader:
    """Finds the queues and reads them.

    Attributes:
        left_out: How many queues were not read, because there are too many.
    """

    def __init__(self, app: App, names: Sequence[str] | None) -> None:
        self._app = app
        self._names = names
        self._scanned: set[str] = set()
        self._scan_at_s = 0.0
        self.left_out = 0

    def read(self) -> Mapping[str, QueueFigures]:
        """Return the queues by their names in the app, or in BullMQ if two have the same."""
        with self._app._broker.pool.client() as client:
            client.connect()
            return read_figures(client, self._keys(client))

    def _keys(self, client: SyncClient) -> list[QueueKeys]:
        if self._names is not None:
            return [self._app._broker.keys(name) for name in self._names]
        config = self._app._config
        is_due = mono_s() >= self._scan_at_s
        found = find_queues(client, config.prefix, self._scanned, scan=is_due).names
        if is_due:
            self._scanned = set(found)
            self._scan_at_s = mono_s() + _SCAN_S
        self.left_out = max(0, len(found) - MAX_QUEUES)
        labels = {name: name_in_app(name, hash_tag=config.queue_hash_tag) for name in found[:MAX_QUEUES]}
        count = Counter(labels.values())
        return [QueueKeys(config.prefix, name, label if count[label] == 1 else name) for name, label in labels.items()]
