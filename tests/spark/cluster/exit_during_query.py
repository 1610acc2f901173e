"""Run a pipeline with Spark Connect and exit abruptly after a batch.

Arguments: the URL of Redis and the lake's directory.
"""

from __future__ import annotations

import os
import sys

from bulltask.lake.ledger import last_record
from bulltask.lake.storage import Lake
from bulltask.spark import Pipeline, session
from bulltask.testing.worker import wait_until


def main(url: str, root: str) -> None:
    query = Pipeline(session("killed"), root, url=url, trigger="200 milliseconds").run()
    wait_until(lambda: last_record(Lake(root)) is not None or not query.isActive, 300.0, "a batch")
    if not query.isActive:
        query.awaitTermination()  # raises the query's error
    sys.stdout.write(str(query.isActive).lower())
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
