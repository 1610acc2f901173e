"""Run the main operations of a pipeline with Spark Connect. Arguments: the URL of Redis and the lake's directory."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

from bulltask.spark import Pipeline, current_session, session


def main(url: str, root: str) -> None:
    spark = session("pipeline")
    assert current_session() is spark
    pipeline = Pipeline(spark, root, url=url, max_events_per_trigger=300)
    pipeline.run(available_now=True).awaitTermination()
    pipeline.run(available_now=True).awaitTermination()  # no new events
    snapshots = pipeline.snapshot(["wait"])
    pipeline.build("gold", days=[datetime.now(UTC).date()])
    json.dump([snapshots, pipeline.gaps().count(), pipeline.status().lost], sys.stdout)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
