"""An app reads results and sends jobs after a restart of Redis."""

from __future__ import annotations

from pathlib import Path

from bulltask import App
from bulltask.jobs.names import JobState
from bulltask.testing.worker import RedisServer


def test_results_are_read_and_jobs_are_sent_after_a_restart_of_redis(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path, appendonly=True) as server:
        app = App("reader", server.url)
        result = app.send_task("work", kwargs={})
        assert result.state is JobState.WAITING
        server.restart()
        assert result.state is JobState.WAITING, "an idle connection that has ended is not used again"
        server.restart()
        assert app.send_task("work", kwargs={}).state is JobState.WAITING
        app.close()
