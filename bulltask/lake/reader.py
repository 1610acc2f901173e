"""Read the lake's tables with Arrow, without Spark; the gaps in them; and the names of their queues."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import reduce as fold
from itertools import starmap
from operator import and_
from typing import Annotated, Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake.exceptions import DeltaError

from bulltask.jobs.errors import ConfigError, LakeError, did_you_mean
from bulltask.lake.formatting import Unit
from bulltask.lake.storage import DataFile, Lake, Snapshot, arrow_schema, days_of, has_one_of
from bulltask.lake.tables import ATTEMPTS, BACKFILLS, BUILT_FIRST, BUILT_LAST, EVENTS, GAPS, JOBS, SNAPSHOTS, Table


def latest_rows(rows: pa.Table, table: Table, *more: str) -> pa.Table:
    """Return one row of a silver table for each key, in which nulls are equal: the row with the latest ``as_of``.

    Of rows with the same ``as_of``, it is the one with the greatest values in ``more`` columns.
    """
    if rows.num_rows < 2:
        return rows
    key = [name for name in table.key if name in rows.column_names]
    order = [*((name, "ascending") for name in key), *((name, "descending") for name in ("as_of", *more))]
    ordered = rows.sort_by(order).combine_chunks()
    is_same = pa.scalar(True)
    for name in key:
        column = ordered[name]
        current, previous = column.slice(1), column.slice(0, len(column) - 1)
        both_null = pc.and_(pc.is_null(current), pc.is_null(previous))
        is_same = pc.and_(is_same, pc.or_(pc.fill_null(pc.equal(current, previous), False), both_null))
    head = pa.chunked_array([pa.array([True])])
    keep = pa.chunked_array(head.chunks + pc.invert(is_same).chunks)
    return ordered.filter(keep)


T = TypeVar("T")

_SCAN: Final = {"batch_size": 32_768, "batch_readahead": 4, "fragment_readahead": 4}
"""Rows per batch, and how many batches and files are read ahead. This bounds the memory of a read."""

_MAX_LOOK_UP: Final = 100
"""Of how many jobs the rows are looked up. Most row groups have some of more jobs, and SQL is slow, then."""

_MAX_NAMED: Final = 8
"""How many queues an error message lists."""

_PARQUET: Final = ds.ParquetFileFormat()


class TableReader:
    """A reader of tables, or of the rows of the lake's broker. Each read sees one version of a table.

    Raises:
        LakeError: There is no lake; or, in every method, a file cannot be read.
    """

    def __init__(self, lake: Lake) -> None:
        lake.check()
        self._lake = lake

    def days(self, table: Table) -> list[date]:
        """Return the days that a table has rows of, in order."""
        return days_of(self._lake.open(table))

    def queues(self, table: Table) -> list[str]:
        """Return the queues that a table has rows of, in order."""
        snapshot = self._lake.open(table)
        names: set[str] = set()
        mixed: list[DataFile] = []
        for file in snapshot.files() if snapshot else ():
            low = file.low.get("queue")
            if low is not None and low == file.high.get("queue"):
                names.add(low)
            else:
                mixed.append(file)
        with self._reading(table):
            for fragment in dataset_of(self._lake, table, mixed).get_fragments():
                names.update(_queues_in(fragment))
        return sorted(name for name in names if not self._lake.broker or self._lake.has_queue(name))

    def scan(  # noqa: PLR0913 - its filters are keywords
        self,
        table: Table,
        days: Iterable[date],
        reduce: Callable[[Iterator[Any]], T],
        *,
        where: Any = None,
        columns: Sequence[str] | None = None,
        queue: str | Collection[str] | None = None,
        job_ids: Collection[str] | None = None,
    ) -> T:
        """Read a table's rows batch by batch, in any order, and return the result of ``reduce``.

        ``where`` is an Arrow expression. Files are skipped whose statistics show that they have no row of the queues
        or of the jobs. The default columns are all, including the partition.
        """
        snapshot, values = self._lake.open(table), dict[str, list[str]]()
        files = snapshot.files({str(day) for day in days}) if snapshot else []
        if queue is not None:
            values["queue"] = [queue] if isinstance(queue, str) else list(queue)
        if job_ids is not None:
            values[table.id_column] = list(job_ids)
        terms = [] if where is None else [where]
        if self._lake.broker:
            terms.append(pc.starts_with(pc.field("queue"), self._lake.queue_prefix))
        for column, wanted in values.items():
            files = files_with(files, column, wanted)
            terms.append(pc.field(column).isin(wanted))
        with self._reading(table):
            if snapshot and files and job_ids is not None and max(map(len, values.values())) <= _MAX_LOOK_UP:
                rows = _look_up(table, snapshot, values, {file.partition for file in files})
            else:
                rows = dataset_of(self._lake, table, files)
        return reduce(self._batches(table, rows, fold(and_, terms) if terms else None, columns))

    def rows(self, table: Table, days: Iterable[date] | None = None, **filters: Any) -> list[dict[str, Any]]:
        """Return rows as :meth:`scan` reads them, with the same filters; by default those of all days."""

        def collect(batches: Iterator[Any]) -> list[dict[str, Any]]:
            return [row for batch in batches for row in batch.to_pylist()]

        return self.scan(table, self.days(table) if days is None else days, collect, **filters)

    def count(self, table: Table, days: Iterable[date], queue: str | None = None) -> int:
        """Return the number of rows in some days, without reading them if possible; some may be superseded."""
        day_list = list(days)
        if queue is None and not self._lake.broker:
            snapshot = self._lake.open(table)
            return sum(file.rows for file in snapshot.files({str(day) for day in day_list})) if snapshot else 0

        def count_rows(batches: Iterator[Any]) -> int:
            return sum(int(batch.num_rows) for batch in batches)

        return self.scan(table, day_list, count_rows, columns=(), queue=queue)

    def _batches(self, table: Table, rows: Any, where: Any, columns: Sequence[str] | None) -> Iterator[Any]:
        names = list(columns) if columns is not None else arrow_schema(table).names
        scanner = rows.scanner(columns=names, filter=where, **_SCAN)
        with self._reading(table):
            yield from (batch for batch in scanner.to_batches() if batch.num_rows)

    @contextmanager
    def _reading(self, table: Table) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, DeltaError, OSError) as exc:
            raise LakeError(f"{self._lake.location(table)} cannot be read: {exc}") from exc


def _look_up(table: Table, snapshot: Snapshot, values: Mapping[str, Iterable[str]], partitions: Collection[str]) -> Any:
    """Return the rows with some values in some columns, as a dataset."""
    rows = snapshot.find(" AND ".join(starmap(has_one_of, values.items())), partitions=partitions)
    return ds.dataset(pa.Table.from_pylist(rows.to_pylist(), arrow_schema(table)))  # which may lack a new column


def files_with(files: Iterable[DataFile], column: str, values: Iterable[str]) -> list[DataFile]:
    """Return the files that may have a row with one of some values in a column, by their statistics."""
    wanted = sorted(values)

    def may_have(file: DataFile) -> bool:
        low, high = file.low.get(column), file.high.get(column)
        first = 0 if low is None else bisect_left(wanted, low)
        return first < len(wanted) and (high is None or wanted[first] <= high)

    return [file for file in files if may_have(file)]


def _queues_in(fragment: Any) -> set[str]:
    """Return the queues in a file; a merged file is in order of the queues, so few of its row groups are read."""
    names: set[str] = set()
    mixed: list[int] = []
    for group in fragment.row_groups:
        ends = (group.statistics or {}).get("queue")
        if ends is not None and ends["min"] == ends["max"]:
            names.add(ends["min"])
        else:
            mixed.append(group.id)
    if mixed:
        names.update(pc.unique(fragment.subset(row_group_ids=mixed).to_table(columns=["queue"])["queue"]).to_pylist())
    return names


def dataset_of(lake: Lake, table: Table, files: Sequence[DataFile]) -> Any:
    """Return some files of a table as a ``pyarrow.dataset.Dataset``."""
    system, partitions = lake.files, {file.partition for file in files}
    values = {value: pc.field(table.partition) == value for value in partitions}
    fragments = [
        _PARQUET.make_fragment(f"{table.layer}/{table.name}/{file.path}", system, values[file.partition])
        for file in files
    ]
    return ds.FileSystemDataset(fragments, arrow_schema(table), _PARQUET, system)


def known_queues(reader: TableReader, *more: Table) -> set[str]:
    """Return the queues in bronze and silver tables, and in ``more``: gold tables may be kept for longer."""
    return {name for table in (EVENTS, ATTEMPTS, JOBS, SNAPSHOTS, GAPS, *more) for name in reader.queues(table)}


def normalize_queue(queue: str, known: Collection[str]) -> str:
    """Return a queue's name in the lake: ``mail`` for BullMQ's ``{mail}``, unless the lake has the name with braces."""
    in_braces = queue.startswith("{") and queue.endswith("}")
    return queue[1:-1] if in_braces and queue not in known else queue


def check_queues(root: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check that a lake has data for each queue, because a misspelled name looks like a queue without jobs.

    An empty lake accepts all names. Others raise ``ConfigError``, which lists the lake's queues, most similar first.
    """
    for queue in names if known else ():
        if queue not in known:
            similar = sorted(known, key=lambda name: (-difflib.SequenceMatcher(None, queue, name).ratio(), name))
            more = f" and {len(similar) - _MAX_NAMED:,} more" if len(similar) > _MAX_NAMED else ""
            hint = did_you_mean(queue, known) or "."
            raise ConfigError(
                f"the lake {root} has no data for queue {queue!r}{hint} It has {', '.join(similar[:_MAX_NAMED])}{more}"
            )


CLOCK_TOLERANCE: Final = timedelta(seconds=10)
"""How much the clock of the worker that writes ``finishedOn`` to the job's hash may differ from Redis' clock."""

_BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class GapRow:
    """Lost events of one queue, with the columns of ``bronze.gaps``, and the headings of a report's table.

    Attributes:
        backfilled_jobs: The number of jobs that backfills have added; ``None`` if there was no backfill.
    """

    queue: Annotated[str, "Queue", Unit.NAME]
    last_id_before: str
    first_id_after: str | None
    lost: Annotated[int, "Events lost", Unit.COUNT]
    exact: Annotated[bool, "Exact number", Unit.FLAG]
    loss_reason: Annotated[str, "Reason", Unit.TEXT]
    last_at_before: Annotated[datetime | None, "Last event before", Unit.TIME]
    first_at_after: Annotated[datetime | None, "First event after", Unit.TIME]
    detected_at: Annotated[datetime, "Detected", Unit.TIME]
    backfilled_jobs: Annotated[int | None, "Jobs backfilled", Unit.COUNT]

    def overlaps(self, since: datetime | None, until: datetime | None) -> bool:
        """Whether lost events can be from this period."""
        until_at = self.first_at_after or self.detected_at
        late = until is not None and self.last_at_before is not None and self.last_at_before >= until
        return not late and (since is None or until_at >= since)

    @property
    def finish_period(self) -> tuple[datetime, datetime]:
        """The period, by workers' clocks, in which jobs without their *completed* or *failed* event finished."""
        begin = _BEGINNING if self.last_at_before is None else self.last_at_before - CLOCK_TOLERANCE
        return begin, (self.first_at_after or self.detected_at) + CLOCK_TOLERANCE


def find_gaps(
    lake: Lake, *, since: datetime | None = None, until: datetime | None = None, queues: Collection[str] | None = None
) -> list[GapRow]:
    """Return the gaps that end at ``since`` or later and begin before ``until``, in order of their detection."""
    reader, backfilled = TableReader(lake), Counter[tuple[Any, ...]]()
    for row in reader.rows(BACKFILLS):
        backfilled[_gap_key(row)] += row["backfilled_jobs"]
    columns = [name for name in GapRow.__dataclass_fields__ if name != "backfilled_jobs"]
    gaps = (
        GapRow(**{name: row[name] for name in columns}, backfilled_jobs=backfilled.get(_gap_key(row)))
        for row in reader.rows(GAPS)
    )
    matching = (gap for gap in gaps if gap.overlaps(since, until) and (queues is None or gap.queue in queues))
    return sorted(matching, key=lambda gap: (gap.detected_at, gap.queue))


def days_in_gaps(lake: Lake, days: Iterable[date]) -> list[date]:
    """Return the days on which jobs without their *completed* or *failed* event may have finished.

    A backfill writes rows to these days only.
    """
    periods = [gap.finish_period for gap in find_gaps(lake)]
    return [day for day in days if any(begin.date() <= day <= end.date() for begin, end in periods)]


def half_built_days(lake: Lake) -> list[date]:
    """Return the days of gold whose tables contradict each other, because the process that built them was killed."""
    first, last = (snapshot and snapshot.last_metadata() for snapshot in map(lake.open, (BUILT_FIRST, BUILT_LAST)))
    return [date.fromisoformat(day) for day in first["days"]] if first and first != last else []


def _gap_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a gap. It includes the time, because every new stream of a queue begins at ``0-0``."""
    return tuple(row[name] for name in GAPS.key)
