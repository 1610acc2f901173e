"""Relays, which poll an outbox's table and send its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from bulltask.clock import mono_ms
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.outbox.sending import RowSender
from bulltask.outbox.store import Backlog, Store, TransferOutcome
from bulltask.ports import OutboxRelay

__all__ = ["Relay", "run_relays"]

_BATCH: Final = 500
_FIRST_RETRY_MS: Final = 100
_MAX_RETRY_MS: Final = 10_000
_REPORT_MS: Final = 60_000
_STOP_S: Final = 5.0


class Relay:
    """Sends the rows of one outbox.

    It may be killed at any moment, and any number of relays may read the same table.

    Args:
        store: Accesses the rows.
        sender: Sends the rows.
        poll_s: Seconds between two reads of a table without rows.
        now_ms: Returns the time in epoch milliseconds.
        logger: Logs errors.
    """

    def __init__(self, store: Store, sender: RowSender, poll_s: float, now_ms: Callable[[], int], logger: Any) -> None:
        self._store, self._sender, self._poll_s, self._now_ms, self._logger = store, sender, poll_s, now_ms, logger
        self._failures = 0
        self._report_at_ms = mono_ms() + _REPORT_MS

    def run(self, wait: Callable[[float], bool]) -> None:
        """Send rows until ``wait`` returns true."""
        wait_s = 0.0
        while not wait(wait_s):
            wait_s = self._send_rows()
            self._report()
        self._close()

    def send_batch(self) -> TransferOutcome:
        """Send up to 500 rows, and log those that can never be sent.

        Raises:
            BrokerError: Redis cannot store them.
            Exception: The database cannot be read; an error of its library.
        """
        sent = self._store.send_waiting(_BATCH, self._sender.send)
        for row_id, error in sent.failed.items():
            self._logger.error(
                "Outbox row failed", row=row_id, error=error, hint="To send it again, set the column error to NULL"
            )
        return sent

    def _send_rows(self) -> float:
        """Send a batch; return the seconds to wait before the next one."""
        try:
            if self._failures:
                self._sender.check()  # before the rows are locked, because it may take until all timeouts have passed
            sent = self.send_batch()
        except Exception as exc:  # noqa: BLE001 - a relay must survive outages of the database and Redis
            self._failures += 1
            wait_ms = reconnect_delay_ms(self._failures, first_ms=_FIRST_RETRY_MS, cap_ms=_MAX_RETRY_MS)
            error, delay = f"{type(exc).__name__}: {exc}", wait_ms / 1000
            self._logger.warning("Outbox rows could not be sent", error=error, attempt=self._failures, delay=delay)
            self._close()
            return delay
        if self._failures:
            self._logger.info("Outbox relay recovered", after_attempts=self._failures)
            self._failures = 0
        return 0.0 if len(sent.done) + len(sent.failed) == _BATCH else self._poll_s

    def _report(self) -> None:
        """Once a minute, log if a row has been waiting for more than a minute, or if rows have failed."""
        if mono_ms() < self._report_at_ms:
            return
        self._report_at_ms = mono_ms() + _REPORT_MS
        try:
            backlog: Backlog = self._store.backlog(self._now_ms())
        except Exception:  # noqa: BLE001 - the next attempt to send logs the error
            self._close()
            return
        if backlog.failed or backlog.oldest_s * 1000 > _REPORT_MS:
            self._logger.warning(
                "Outbox rows are waiting", rows=backlog.waiting, oldest_s=backlog.oldest_s, failed=backlog.failed
            )

    def _close(self) -> None:
        with suppress(Exception):  # a broken connection may refuse to be closed
            self._store.close()


def run_relays(outboxes: Sequence[OutboxRelay], until: Callable[[], object], logger: Any) -> None:
    """Run the relay of each outbox in a thread until ``until`` returns; call this in the main thread.

    Args:
        outboxes: The outboxes of an app.
        until: Blocks until the relays should stop.
        logger: Logs errors.
    """
    stopping = threading.Event()
    threads = [
        threading.Thread(target=outbox.run_relay, args=(stopping.wait, logger), name="outbox-relay", daemon=True)
        for outbox in outboxes
    ]
    for thread in threads:
        thread.start()
    until()
    stopping.set()
    deadline_ms = mono_ms() + int(_STOP_S * 1000)
    for thread in threads:
        thread.join(max(0, deadline_ms - mono_ms()) / 1000)
