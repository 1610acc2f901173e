"""Settings in the environment of a worker."""

from __future__ import annotations

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


def test_a_worker_warns_about_unknown_variables_and_suggests_a_setting(harness: WorkerHarness) -> None:
    environ = {
        "BULLTASK_LOCK_DURATON": "60",  # codespell:ignore duraton
        "BULLTASK_X": "1",
        "BULLTASK_APP": "tasks",
        "BULLTASK_BROKER_URL_FILE": "/run/secrets/broker",
        "BULLTASK_DRAIN_DELAY": "1",
    }
    worker = harness.worker(children=1, environ=environ)
    worker.wait_for_line("Worker started")
    assert [(line["variable"], line["event"]) for line in worker.warnings()] == [
        (
            "BULLTASK_LOCK_DURATON",  # codespell:ignore duraton
            "An environment variable matches no setting and is ignored; did you mean 'lock_duration'?",
        ),
        ("BULLTASK_X", "An environment variable matches no setting and is ignored"),
    ]


def test_a_worker_warns_about_a_renew_time_over_half_the_lock_duration(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1, settings={"lock_duration": 30, "lock_renew_time": 16})
    worker.wait_for_line("Worker started")
    warnings = [(line["event"], line["lock_renew_time"], line["lock_duration"]) for line in worker.warnings()]
    event = "lock_renew_time is more than half of lock_duration: reduce it, or a few failed renewals lose a lock"
    assert warnings == [(event, 16, 30)]
