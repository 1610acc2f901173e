"""Adds each job of a row to Redis once, even if relays send the row several times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from bulltask.app import App
from bulltask.errors import BrokerError, DecodeError
from bulltask.outbox.store import Row, TransferOutcome
from bulltask.outbox.stored import StoredCall
from bulltask.queue.flow_once import add_flow_once
from bulltask.transport.call import command
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.add import IdempotentWrite

__all__ = ["RowSender"]


class RowSender:
    """Sends rows to an app's server.

    If a relay is killed after it has sent a row, but before it has deleted the row, another relay sends the row again.
    By then, the jobs may have run and been removed. Therefore, Redis remembers the ids of added jobs for ``ttl_ms``.

    Args:
        app: The app.
        ttl_ms: How long Redis remembers an added job, in milliseconds.
    """

    def __init__(self, app: App, ttl_ms: int) -> None:
        self._app, self._ttl_ms = app, ttl_ms

    def check(self) -> None:
        """Raise ``BrokerError`` if Redis does not answer."""
        if self._app.broker.eager is None:
            self._app.broker.pool.run(command("PING"))

    def send(self, rows: Sequence[Row]) -> TransferOutcome:
        """Send rows in order.

        Raises:
            BrokerError: Redis could not be reached, or refused to write. Some of the rows may have been sent.
        """
        calls, failed = _decode(rows)
        if self._app.broker.eager is not None:
            return self._send_each(calls, failed)
        try:
            self._send(list(calls.values()))
        except Exception as exc:
            if _affects_all_rows(exc):
                raise
            return self._send_each(calls, failed)
        return TransferOutcome(list(calls), failed)

    def _send_each(self, calls: dict[int, StoredCall], failed: dict[int, str]) -> TransferOutcome:
        """Send the rows one by one, because at least one of them was rejected."""
        done: list[int] = []
        rejected: BrokerError | None = None
        for row_id, call in calls.items():
            try:
                self._send([call])
                done.append(row_id)
            except Exception as exc:
                if _affects_all_rows(exc):
                    raise
                if isinstance(exc, BrokerError):
                    rejected = exc
                failed[row_id] = _text(exc)
        if rejected is not None and not done:
            raise rejected  # the server may be rejecting everything
        return TransferOutcome(done, failed)

    def _send(self, calls: Sequence[StoredCall]) -> None:
        broker = self._app.broker
        if broker.eager is not None:
            for call in calls:
                broker.eager.run(call.roots)
            return
        for write_id, group in groupby(calls, key=lambda call: call.write_id):
            same_write = list(group)
            if jobs := [job for call in same_write if (job := call.single) is not None]:
                broker.producer.send_once(jobs, IdempotentWrite(write_id, self._ttl_ms))
            else:
                with broker.pool.client() as client:
                    client.connect()  # sets the clock; the calls contain its time
                    run_sync(client, add_flow_once(same_write[0].roots, broker, write_id, self._ttl_ms))


def _decode(rows: Sequence[Row]) -> tuple[dict[int, StoredCall], dict[int, str]]:
    calls, failed = dict[int, StoredCall](), dict[int, str]()
    for row in rows:
        try:
            calls[row.id] = StoredCall.decode(row.payload)
        except DecodeError as exc:
            failed[row.id] = _text(exc)
    return calls, failed


def _affects_all_rows(exc: Exception) -> bool:
    """Whether other rows would also fail. A plain ``BrokerError`` is an error reply that may affect only one row."""
    return isinstance(exc, BrokerError) and type(exc) is not BrokerError


def _text(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
