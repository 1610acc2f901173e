"""Names that a Celery project imports exist in bulltask, or importing them says what to use."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

import bulltask
from bulltask import App, Celery, ConfigError, crontab, exceptions, schedule, schedules
from bulltask.errors import BulltaskError, Interrupt

EXCEPTIONS = """
AlreadyRegistered AlwaysEagerIgnored BackendError BackendGetMetaError BackendStoreError CDeprecationWarning
CPendingDeprecationWarning CeleryCommandException CeleryError CeleryWarning ChordError DuplicateNodenameWarning
DuplicateTaskNameWarning FixupWarning Ignore ImproperlyConfigured IncompleteStream InvalidTaskError
MaxRetriesExceededError NotConfigured NotRegistered OperationalError QueueNotFound Reject Retry SecurityError
SecurityWarning SoftTimeLimitExceeded TaskError TaskPredicate TaskRevokedError Terminated TimeLimitExceeded TimeoutError
WorkerLostError WorkerShutdown WorkerTerminate reraise
""".split()
"""``celery.exceptions.__all__`` in Celery 5.7."""


def test_celery_is_another_name_of_app() -> None:
    assert Celery is App


def test_each_of_celerys_exceptions_exists_or_importing_it_says_what_to_use() -> None:
    reasons = {}
    for name in EXCEPTIONS:
        found: dict[str, Any] = {}
        try:
            exec(f"from bulltask.exceptions import {name}", found)
        except ImportError as exc:
            reasons[name] = str(exc)
        else:
            assert issubclass(found[name], BulltaskError | Interrupt)
            assert name in exceptions.__all__
    assert set(exceptions.__all__) == set(EXCEPTIONS) - reasons.keys()
    for name, text in reasons.items():
        assert re.fullmatch(rf"cannot import Celery's '{name}' from bulltask.exceptions: .{{15,}}", text)
    assert "a job whose child process died runs again" in reasons["WorkerLostError"]


@pytest.mark.parametrize("name", ["celery_error", "_private"])
def test_an_unknown_exception_is_an_ordinary_error(name: str) -> None:
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'bulltask.exceptions'"):
        exec(f"from bulltask.exceptions import {name}", {})
    assert not hasattr(exceptions, name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("uuid", r"task_id=str\(uuid.uuid4\(\)\)"),
        ("maybe_signature", "use signature"),
        ("EagerResult", "returns an AsyncResult"),
    ],
)
def test_importing_one_of_celerys_other_names_says_what_to_use(name: str, hint: str) -> None:
    with pytest.raises(ImportError, match=f"cannot import '{name}' from bulltask: .*{hint}"):
        exec(f"from bulltask import {name}", {})


def test_schedule_is_an_interval_and_not_a_module() -> None:
    assert (schedule(30), schedule(run_every=timedelta(minutes=1))) == (timedelta(seconds=30), timedelta(minutes=1))
    assert (schedules.schedule, schedules.crontab) == (schedule, crontab)
    assert bulltask.schedule is schedule
    with pytest.raises(ConfigError, match="relative intervals are not supported"):
        schedule(30, relative=True)
