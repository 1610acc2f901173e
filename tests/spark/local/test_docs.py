"""The programs in the Spark documentation run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from bulltask.queue import Queue

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(600)]

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["spark.md", "spark-tasks.md"])
def test_every_program_on_a_page_runs(
    spark: SparkSession, broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("BULLTASK_BROKER_URL", broker_url)
    (tmp_path / "orders").mkdir()
    with Queue("mail", broker_url) as queue, Queue("billing", broker_url) as billing:
        queue.add("mail.send", {"id": 7})
        billing.add("bill", {"id": 7})
    namespace: dict[str, Any] = {"__name__": "docs"}
    blocks = re.findall(r"^```py\n(.*?)^```", (DOCS / "how-to" / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for number, block in enumerate(blocks):
        program = block.replace('"/data', f'"{tmp_path}')
        # The data source uses the environment in which Spark was started, before the server was started.
        program = program.replace('format("bulltask")', f'format("bulltask").option("url", "{broker_url}")')
        program = program.replace("OPTIONS (", f"OPTIONS (url '{broker_url}', ")
        # This test has no worker, so do not wait for jobs.
        program = program.replace("wait=600", "wait=1").replace("wait=60", "wait=0.1")
        exec(compile(program, f"{page}, block {number}", "exec"), namespace)
    for query in spark.streams.active:
        query.stop()
