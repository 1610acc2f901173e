"""One task of a write: the jobs of its rows, sent behind the write's fence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from bulltask.jobs.job import NewJob
from bulltask.spark.sink.rows import Columns, JobMaker, columns_of
from bulltask.spark.source.collecting import no_search_for_cycles
from bulltask.spark.source.connection import broker_of
from bulltask.transport.broker import Broker
from bulltask.transport.scripts.fence import Fence, Sent

__all__ = ["Sending", "Sums", "how_to_go_on"]


@dataclass(frozen=True, slots=True)
class Sums:
    """What a task has sent.

    Attributes:
        rows: how many rows it was given.
        added: jobs that were not there before.
        duplicated: rows whose job was there already, or had been added by this write before. Where a job is sent
            twice because the first reply was lost, its second answer counts.
    """

    rows: int = 0
    added: int = 0
    duplicated: int = 0


@dataclass(frozen=True, slots=True)
class Sending:
    """Responsible for sending the rows of a task; travels to the executors, and holds no connection.

    Attributes:
        maker: makes the jobs.
        columns: where the rows say what.
        batch: jobs of a round trip.
        fence_ttl_ms: how long the fence is kept; ``None``: there is none, and every row counts as added.
    """

    maker: JobMaker
    columns: Columns
    batch: int
    fence_ttl_ms: int | None

    def send(self, batches: Iterable[pa.RecordBatch]) -> Sums:
        """Send all rows of some Arrow batches and count what became of them; errors are those of :meth:`sent`."""
        rows = added = 0
        for sent in self.sent(batches):
            rows += len(sent)
            added += sum(one.outcome == "added" for one in sent)
        return Sums(rows, added, rows - added)

    def sent(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[Sent]]:
        """Send all rows of some Arrow batches; for each batch, what became of its rows.

        The rows of a round trip are checked before it is sent.

        Raises:
            BulltaskError: a row makes no job, or Redis cannot be reached. What was sent before stays: there is no
                way back for jobs that may have run. The same write again adds what is missing. This and whatever else
                comes in between has a note that says so (``[BULLTASK_WRITE_ABORTED]``).
        """
        broker = broker_of(self.maker.config)
        rows = 0
        try:
            for batch in batches:
                jobs = map(self.maker.make, *columns_of(batch, self.columns))
                found: list[Sent] = []
                with no_search_for_cycles():
                    while part := list(islice(jobs, self.batch)):
                        found += self._send(broker, part)
                        rows += len(part)
                yield found
        except Exception as exc:
            exc.add_note(f"{how_to_go_on(self.maker.write_id)} This try had sent {rows:,} rows.")
            raise
        finally:
            broker.close()

    def _send(self, broker: Broker, part: list[NewJob]) -> list[Sent]:
        if self.fence_ttl_ms is None:
            return [Sent(job_id, "added") for job_id in broker.producer.send(part)]
        return broker.producer.send_fenced(part, Fence(self.maker.write_id, self.fence_ttl_ms))


def how_to_go_on(write_id: str) -> str:
    """What somebody needs to know whose write has failed."""
    return (
        f"[BULLTASK_WRITE_ABORTED] The write {write_id} has failed, and the jobs that it has sent stay. Write the same "
        "rows again with this write id, and only what is missing is added; a stream does so when it is started again "
        "with its checkpoint."
    )
