"""Retries and failures: which errors are retried, self.retry(), and the exceptions that get() raises."""

from __future__ import annotations

import time
from typing import Any

from tests.celery_parity.scenario import Area, raised
from tests.celery_parity.tasks import Order, Refused

AREA = Area("Retries and failures")
same, better, differs = AREA.same, AREA.better, AREA.differs


def outcome_and_runs(p: Any, sent: Any) -> list[object]:
    """Return a task's result, or its exception as text, and how many times it ran."""
    values: list[object] = []
    error = raised(lambda: values.append(p.get(sent)))
    return [error or values[0], len(p.notes_so_far())]


def exception_of(p: Any, sent: Any) -> Any:
    """Return the exception with which a task fails."""
    try:
        p.get(sent)
    except Exception as exc:  # noqa: BLE001 - the exception is what the scenario is about
        return exc
    return None


# ---- exceptions ------------------------------------------------------------------------------------------------------

same("`get` raises the exception of the task.", "ValueError", lambda p: p.get(p.boom.delay()))
same("The exception keeps its message.", "boom", lambda p: str(exception_of(p, p.boom.delay())))
same(
    "An exception of one of the project's classes keeps its class.",
    True,
    lambda p: type(exception_of(p, p.fails_with.delay("Refused"))) is Refused,
)
same("A `KeyError` keeps its key.", ["key"], lambda p: list(exception_of(p, p.fails_with.delay("KeyError")).args))
same(
    "An exception that is raised without a message has an empty message.",
    "",
    lambda p: str(exception_of(p, p.fails_with.delay("empty"))),
)
same(
    "The exception keeps its arguments.",
    ["no", 7],
    lambda p: list(exception_of(p, p.fails_with.delay("Refused")).args),
)
same(
    "An exception of a nested class, such as Django's `Order.DoesNotExist`, keeps its class.",
    True,
    lambda p: type(exception_of(p, p.fails_with.delay("nested"))) is Order.DoesNotExist,
)
better(
    "An exception whose constructor needs more arguments is raised as an `UnpickleableExceptionWrapper`.",
    ("UnpickleableExceptionWrapper", "Invoice"),
    "the exception keeps its class, so `except Invoice` works; the constructor is not called",
    lambda p: type(exception_of(p, p.fails_with.delay("Invoice"))).__name__,
)
better(
    "The exception that `get` raises has no traceback of the worker.",
    (False, True),
    "the traceback is the exception's `__cause__`, so logs show both",
    lambda p: 'raise ValueError("boom")' in str(exception_of(p, p.boom.delay()).__cause__),
)


@same("`result.traceback` is the traceback of the worker.", True)
def _(p: Any) -> object:
    result = p.chained_error.delay()
    p.fails(result)
    return 'raise KeyError("inner")' in result.traceback and 'raise ValueError("outer")' in result.traceback


# ---- without self.retry() --------------------------------------------------------------------------------------------

same("A bug, such as a `ValueError`, is not retried.", "ValueError", lambda p: p.get(p.boom.delay()) or 1)
better(
    "A lost connection is not retried.",
    (["ConnectionError", 1], ["ConnectionError", 3]),
    "the task is retried twice, after 1 s and 2 s, unless `task_max_retries` is 0",
    lambda p: outcome_and_runs(p, p.disconnects.delay(p.key)),
)
same(
    "With `max_retries=0`, a lost connection is not retried.",
    ["ConnectionError", 1],
    lambda p: outcome_and_runs(p, p.disconnects_without_retries.delay(p.key)),
)
same(
    "A task is retried after an exception of `autoretry_for`.",
    ["done", 2],
    lambda p: outcome_and_runs(p, p.autoretries.delay(p.key, 1)),
)
same(
    "After `max_retries` retries, the task fails with its exception.",
    ["Refused", 3],
    lambda p: outcome_and_runs(p, p.autoretries.delay(p.key, 9)),
)
same(
    "`autoretry_for` includes subclasses.",
    ["done", 2],
    lambda p: outcome_and_runs(p, p.autoretries.delay(p.key, 1, declined=True)),
)
same(
    "`dont_autoretry_for` excludes exceptions from `autoretry_for`.",
    ["Declined", 1],
    lambda p: outcome_and_runs(p, p.autoretries_most.delay(p.key)),
)
differs(
    "Without `max_retries`, a task is retried three times.",
    (["Refused", 4], ["Refused", 3]),
    "the default is 2; `task_max_retries=3` changes it",
    lambda p: outcome_and_runs(p, p.autoretries_by_default.delay(p.key)),
)
same("`retry_backoff` makes each delay longer than the one before.", True, lambda p: delays_grow(p))


def delays_grow(p: Any) -> bool:
    p.get(p.backs_off.delay(p.key))
    first, second, third = map(float, p.notes(3))
    return (third - second) - (second - first) > 0.5


# ---- self.retry() ----------------------------------------------------------------------------------------------------

same("`self.retry()` runs the task again.", 2, lambda p: p.get(p.retries.delay(p.key, 2)))
same("`raise self.retry()` also runs the task again.", 1, lambda p: p.get(p.raises_retry.delay()))


@same("Each attempt has the same id, and `self.request.retries` counts the retries.", True)
def _(p: Any) -> object:
    result = p.retries.delay(p.key, 2)
    p.get(result)
    return p.notes(3) == [str([number, result.id]) for number in range(3)]


@same("The code after `self.retry()` does not run.", False)
def _(p: Any) -> object:
    p.get(p.retries.delay(p.key, 1))
    return "after retry" in p.notes_so_far()


same(
    "When no retry is left, `self.retry(exc=…)` fails the task with that exception.",
    ["ValueError", 4],
    lambda p: outcome_and_runs(p, p.retries.delay(p.key, 9, exc="ValueError")),
)
same(
    "When no retry is left, `self.retry()` fails the task with `MaxRetriesExceededError`.",
    "MaxRetriesExceededError",
    lambda p: p.get(p.retries.delay(p.key, 9)),
)
same(
    "`self.retry(max_retries=…)` can lower the number of retries.",
    ["ValueError", 2],
    lambda p: outcome_and_runs(p, p.retries.delay(p.key, 9, exc="ValueError", max_retries=1)),
)
same(
    "`self.retry(max_retries=…)` can raise the number of retries.",
    ["ValueError", 6],
    lambda p: outcome_and_runs(p, p.retries.delay(p.key, 9, exc="ValueError", max_retries=5)),
)
same("`max_retries=None` means no limit.", 8, lambda p: p.get(p.retries_forever.delay(8)))
same(
    "With `max_retries=0`, `self.retry(exc=…)` fails the task with that exception.",
    ["ValueError", 1],
    lambda p: outcome_and_runs(p, p.may_not_retry.delay(p.key)),
)
differs(
    "Without `max_retries`, `self.retry()` retries a task three times.",
    (["ValueError", 4], ["ValueError", 3]),
    "the default is 2; `task_max_retries=3` changes it",
    lambda p: outcome_and_runs(p, p.retries_as_often_as_the_default_allows.delay(p.key)),
)
better(
    "`except Exception` around `self.retry()` swallows `Retry`; the task ends, but still runs again.",
    ("swallowed", 1),
    "`except Exception` does not catch `Retry`, because it is a `BaseException`",
    lambda p: p.get(p.retries_inside_try.delay(p.key)),
)


@same("`self.retry(countdown=…)` delays the next attempt.", True)
def _(p: Any) -> object:
    before = time.monotonic()
    p.get(p.retries_later.delay(p.key, error=False))
    return time.monotonic() - before >= 1


@same("A task that waits for its retry is not ready.", [False, "done"])
def _(p: Any) -> object:
    result = p.retries_later.delay(p.key, error=False)
    p.notes()
    return [result.ready(), p.get(result)]


@differs(
    "`str(result.state)` of a task that waits for its retry is `RETRY`.",
    ("RETRY", "delayed"),
    'the state has BullMQ\'s name, `delayed`; `result.state == "RETRY"` is true, and `result.status` is `RETRY`',
)
def _(p: Any) -> object:
    result = p.retries_later.delay(p.key, error=True)
    p.wait_for(lambda: result.state in {"RETRY", "delayed"})
    return str(result.state)


@same("`result.info` of a task that waits for its retry is the exception.", "ValueError")
def _(p: Any) -> object:
    result = p.retries_later.delay(p.key, error=True)
    p.wait_for(lambda: result.state in {"RETRY", "delayed"})
    return type(result.info).__name__


@same("`get` of a task that is retried waits for its last attempt.", "done")
def _(p: Any) -> object:
    return p.get(p.retries_later.delay(p.key, error=True))


same(
    "`self.retry(args=…, kwargs=…)` changes the arguments of the next attempt.",
    1,
    lambda p: p.get(p.retries.delay(p.key, 1, kwargs={"key": p.key, "failures": 1})),
)
same(
    "`self.retry(expires=…)` limits the time of the next attempt.",
    1,
    lambda p: p.get(p.retries.delay(p.key, 1, expires=60)),
)
same(
    "`self.retry(queue=…)` moves the next attempt to another queue.",
    1,
    lambda p: p.get(p.retries.delay(p.key, 1, queue="single")),
)
same(
    "After `self.retry(throw=False)`, the code continues.",
    True,
    lambda p: p.retries.delay(p.key, 1, throw=False).get(60) in {0, 1} and "after retry" in p.notes(3),
)
same(
    "`self.retry(exc=…)` in a task that is called directly raises the exception.",
    "ValueError",
    lambda p: p.retries_directly("ValueError"),
)
same("`self.retry()` in a task that is called directly raises `Retry`.", "Retry", lambda p: p.retries_directly())


@same("`raise Ignore` ends a task: it has not failed, and does not run again.", [False, ["run"]])
def _(p: Any) -> object:
    result = p.raises_exception.delay(p.key, "Ignore")
    first = p.notes()
    p.get(p.add.delay(1, 2))
    return [result.failed(), first + p.notes_so_far()]


better(
    "After `raise Ignore`, `get` waits forever.",
    ("TimeoutError", None),
    "the job completes without a result, and `get` returns `None`",
    lambda p: p.raises_exception.delay(p.key, "Ignore").get(timeout=2 if p.is_celery else 60),
)
same(
    '`update_state(state="FAILURE", meta={"exc_type": …})` and `raise Ignore` fail a task with that exception.',
    ["FAILURE", "ValueError", "no such customer"],
    lambda p: ended(
        p, "FAILURE", {"exc_type": "ValueError", "exc_module": "builtins", "exc_message": ["no such customer"]}
    ),
)
better(
    "If `meta` of the state `FAILURE` is a string, reading the result raises `ValueError`.",
    ("ValueError", ["FAILURE", "TaskError", "no such customer"]),
    "the string is the failure reason",
    lambda p: ended(p, "FAILURE", "no such customer"),
)
same(
    '`update_state(state="SUCCESS", meta=…)` and `raise Ignore` make `meta` the result.',
    ["SUCCESS", {"rows": 3}],
    lambda p: ended(p, "SUCCESS", {"rows": 3}),
)
same(
    '`update_state(state="REVOKED")` and `raise Ignore` revoke the task.',
    "REVOKED",
    lambda p: ended(p, "REVOKED", None)[0],
)
differs(
    "After any other state and `raise Ignore`, the task keeps the state, and `get` waits forever.",
    (["SKIPPED", "TimeoutError"], ["SUCCESS", None]),
    "the task completes without a result",
    lambda p: ended(p, "SKIPPED", 1),
)
same(
    "`raise Reject(requeue=True)` returns a task to its queue, and it runs again.",
    ["done", 2],
    lambda p: outcome_and_runs(p, p.raises_exception.delay(p.key, "Reject", requeue=True)),
)
same(
    "`raise Reject(requeue=False)` ends a task, which does not run again.",
    ["run"],
    lambda p: rejected(p),
)


def rejected(p: Any) -> list[str]:
    p.raises_exception.delay(p.key, "Reject", requeue=False)
    first: list[str] = p.notes()
    p.get(p.add.delay(1, 2))
    return first + list(p.notes_so_far())


def ended(p: Any, state: str, meta: object) -> list[object]:
    """Return the status of a task that sets a state and ends with `Ignore`, and its result or error."""
    sent = p.ignored_in_state.delay(state, meta)
    p.wait_for(lambda: sent.status == state or sent.ready())
    try:
        outcome = [sent.get(timeout=3)]
    except Exception as exc:  # noqa: BLE001 - part of the outcome
        outcome = [type(exc).__name__, *([str(exc).rpartition(": ")[2]] if state == "FAILURE" else [])]
    return [sent.status, *outcome]
