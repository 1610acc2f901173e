"""``bulltask pipeline gather``: write the results of the jobs added by ``enqueue`` to Parquet."""

from __future__ import annotations

from typing import Any

import click

from bulltask.cli.options import redis_options, seconds
from bulltask.cli.pipeline.options import open_session, source_of, spark_options
from bulltask.cli.terminal import as_table

__all__ = ["command"]


@click.command("gather", short_help="Write the results of the jobs added by 'enqueue' to Parquet.")
@click.argument("write_id")
@redis_options
@click.option("--queue", required=True, help="Queue of the jobs.")
@click.option("--out", required=True, metavar="DIR", help="Directory for the Parquet files; must not exist.")
@click.option(
    "--wait",
    type=seconds,
    default="0",
    metavar="DURATION",
    help="How long to wait for unfinished jobs (default: do not wait).",
)
@spark_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    write_id: str,
    queue: str,
    out: str,
    wait: float,
    master: str | None,
    conf: tuple[str, ...],
    **connection: Any,
) -> None:
    """Write the results of an 'enqueue' to Parquet. WRITE_ID is the id that 'enqueue' printed.

    There is a row for each job, with id, state, return_value, failed_reason and finished_at. The state is completed,
    failed, unfinished, or missing if Redis no longer has the job.
    """
    source = source_of(ctx, connection)
    spark = open_session(master, conf)
    from bulltask.spark import EnqueueResult, gather  # noqa: PLC0415 - slow

    write = EnqueueResult(write_id, queue, rows=1, added=0, duplicates=0, seconds=0.0, partitions=0)
    results = gather(
        write, queue, wait=wait, url=source.url, prefix=source.prefix, queue_hash_tag=source.hash_tag
    )  # fmt: skip
    results.write.parquet(out)
    counts = spark.read.parquet(out).groupBy("state").count().orderBy("state").collect()
    click.echo(as_table(("state", "jobs"), [(row["state"], f"{row['count']:,}") for row in counts]))
