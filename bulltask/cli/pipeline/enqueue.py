"""``bulltask pipeline enqueue``: add the rows of a Parquet file as jobs."""

from __future__ import annotations

from typing import Any

import click

from bulltask.cli.options import redis_options
from bulltask.cli.pipeline.options import open_session, source_of, spark_options
from bulltask.lake.formatting import pluralize

__all__ = ["command"]


@click.command("enqueue", short_help="Add a job for each distinct row of a Parquet file.")
@click.argument("file", metavar="FILE.parquet")
@redis_options
@click.option("--queue", required=True, help="Queue to add the jobs to.")
@click.option("--name", help="Task name of all jobs.")
@click.option("--name-col", help="Column with the task name of each job.")
@click.option("--data-cols", required=True, help="Columns that become the job's data, comma-separated.")
@click.option("--id-col", help="Column with the job ids (default: derived from the row).")
@click.option(
    "--write-id", help="Id of the write: rows that were already added with this id are skipped (default: a new id)."
)
@spark_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    file: str,
    queue: str,
    name: str | None,
    name_col: str | None,
    data_cols: str,
    id_col: str | None,
    master: str | None,
    conf: tuple[str, ...],
    **options: Any,
) -> None:
    """Add one job to a queue for each distinct row of a Parquet file or a directory of them.

    However often Spark retries a task, each job is added once. Rows with the same name and data become one
    job; with --id-col, rows with the same id do.

    The command prints the id of the write. Pass it to 'gather' to read the results of the jobs, or as --write-id to
    run the command again after an error.
    """
    from bulltask.config.parsers import parse_names  # noqa: PLC0415 - with the other imports

    if (name is None) == (name_col is None):
        raise click.UsageError("pass either --name or --name-col")
    source, write_id = source_of(ctx, options), options["write_id"]
    spark = open_session(master, conf)
    from bulltask.spark.sink.enqueue import FileColumns, enqueue_file  # noqa: PLC0415 - slow

    names = FileColumns(parse_names(data_cols, "--data-cols"), name, name_col, id_col)
    connection: Any = {"url": source.url, "prefix": source.prefix, "queue_hash_tag": source.hash_tag}
    result = enqueue_file(
        spark, file, queue, names, **connection, **({} if write_id is None else {"write_id": write_id})
    )
    click.echo(
        f"{pluralize(result.rows, 'row')}: {pluralize(result.added, 'job')} added, {result.duplicates:,} duplicates"
    )
    click.echo(f"write id {result.write_id}")
