"""Names that a Celery project imports exist in bulltask, or importing them says what to use."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import bulltask
from bulltask import App, Celery, ConfigError, crontab, exceptions, schedule
from bulltask.errors import BulltaskError, Interrupt
from bulltask.jobs import schedules
from tests.celery_parity.idioms import SETUP, for_bulltask, lines

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
        ("xmap", "use task.map"),
        ("EagerResult", "returns an AsyncResult"),
    ],
)
def test_importing_one_of_celerys_other_names_says_what_to_use(name: str, hint: str) -> None:
    with pytest.raises(ImportError, match=f"cannot import '{name}' from bulltask: .*{hint}"):
        exec(f"from bulltask import {name}", {})


def test_celerys_aliases_can_be_imported() -> None:
    from bulltask import get_logger, maybe_signature, subtask  # noqa: PLC0415

    app = App("tested")
    call = app.signature("add", kwargs={"x": 1})
    assert get_logger(__name__) is logging.getLogger(__name__)
    assert subtask is bulltask.signature
    assert (maybe_signature(None), maybe_signature(call)) == (None, call)
    rebuilt = maybe_signature(call.to_dict(), app=app)
    assert rebuilt is not None
    assert rebuilt.to_dict() == call.to_dict()


def test_schedule_is_an_interval_and_not_a_module() -> None:
    assert (schedule(30), schedule(run_every=timedelta(minutes=1))) == (timedelta(seconds=30), timedelta(minutes=1))
    assert (schedules.schedule, schedules.crontab) == (schedule, crontab)
    assert bulltask.schedule is schedule
    with pytest.raises(ConfigError, match="relative intervals are not supported"):
        schedule(30, relative=True)


# ---- import celery ---------------------------------------------------------------------------------------------------

COMPARE = """
import json, sys
from bulltask.celery import Celery

def outcome(statement):
    names = {}
    try:
        exec(statement, names)
    except ImportError as exc:
        return str(exc)
    return {name: id(value) for name, value in names.items() if name != "__builtins__"}

different = [pair for pair in json.load(sys.stdin) if outcome(pair[0]) != outcome(pair[1])]
json.dump(different, sys.stdout)
"""
"""Runs pairs of imports, and prints those that do not import the same objects."""

FORMS = """
import celery.exceptions as x
import celery.signals as x
from celery import signals, states
from celery.app import shared_task
from celery.app.base import Celery
from celery.app.task import Task
from celery.result import AsyncResult, EagerResult
from celery.utils import uuid
"""


def run(program: str, directory: Path, celery: str, stdin: str = "") -> tuple[str, str]:
    """Run a program in a new process in which Celery is installed; return its output and the last line of its errors.

    Args:
        program: Its code.
        directory: Where Celery is installed.
        celery: The code of Celery.
        stdin: Its input.
    """
    (directory / "celery.py").write_text(celery)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(directory)!r})\n{program}"]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr.strip().rpartition("\n")[2]


def test_after_the_import_of_bulltask_celery_all_imports_of_celery_are_those_of_bulltask(tmp_path: Path) -> None:
    statements = [part for line in [*SETUP.splitlines(), *lines(), *FORMS.splitlines()] for part in line.split("; ")]
    imports = sorted({part for part in statements if re.match(r"(from|import) celery\b", part)})
    assert len(imports) >= 40
    translated = for_bulltask("\n".join(imports)).splitlines()
    pairs = json.dumps(list(zip(imports, translated, strict=True)))
    assert run(COMPARE, tmp_path, "raise AssertionError('Celery was imported')", pairs) == ("[]", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("import celery.bootsteps", "celery.bootsteps"),
        ("from celery import bootsteps", "celery.bootsteps"),
        ("from celery.bin.base import CeleryCommand", "celery.bin"),
        ("from celery.utils.log import mlevel", "celery.utils.log.mlevel"),
        ("from bulltask.celery import Celery, bugreport", "celery.bugreport"),
    ],
)
def test_importing_what_only_celery_has_names_the_guide(statement: str, missing: str, tmp_path: Path) -> None:
    program = f"import bulltask.celery, celery; assert not hasattr(celery, 'bootsteps')\n{statement}"
    expected = f"ModuleNotFoundError: bulltask has no equivalent of {missing}: see docs/how-to/coming-from-celery.md"
    assert run(program, tmp_path, "") == ("", expected)


def test_bulltask_does_not_replace_celery_after_it_has_been_imported(tmp_path: Path) -> None:
    output, error = run("import celery, bulltask.celery", tmp_path, "")
    assert output == ""
    assert error == (
        f"bulltask.errors.ConfigError: bulltask cannot replace Celery, which has already been imported ({tmp_path}/"
        "celery.py): uninstall Celery, or import bulltask.celery before any module that imports celery; see "
        "docs/how-to/coming-from-celery.md"
    )
