"""What users can do from the dashboard: each action is a function that does it, and says what it has done.

:data:`DEEDS` has their paths. Which role each needs is decided by :meth:`bulltask.dashboard.access.Access.may`, by its
name, before it is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from starlette.datastructures import FormData
from starlette.requests import Request

from bulltask.config.config import LOG_LEVELS
from bulltask.dashboard.access import User
from bulltask.dashboard.changes import Change
from bulltask.dashboard.forms import Arguments, Invalid, TaskForm, task_form
from bulltask.dashboard.pages import Filter, Pages
from bulltask.jobs.errors import BulltaskError, ConfigError
from bulltask.queue import Job
from bulltask.queue.control import Answers

__all__ = ["DEEDS", "Deed", "Done", "NotFound", "Sent", "form_of", "param", "path"]

_COUNTED_AT_ONCE_S: Final = 0.3
"""How long a reply waits for a count or a change, so that most need no page with their progress."""


class NotFound(Exception):
    """There is no such queue, job or page."""


@dataclass(frozen=True, slots=True)
class Done:
    """What an action has done, and what is shown next.

    Attributes:
        outcome: What it has done, for the audit log.
        path: The path of the page to show; ``None`` for that with the form.
        is_told: Whether the page shows the outcome.
    """

    outcome: str
    path: str | None = None
    is_told: bool = True


class Sent(NamedTuple):
    """A form that a user has sent."""

    pages: Pages
    user: User
    request: Request
    form: FormData

    def param(self, name: str) -> str:
        """Return a part of the path."""
        return param(self.request, name)

    def text(self, name: str) -> str:
        """Return a field, ``""`` if it was not sent."""
        return str(self.form.get(name, "")).strip()

    def number(self, name: str, *, least: float = 0) -> float | None:
        """Return a number, ``None`` if the field is empty; raises ``ConfigError`` if it is not a number."""
        text = self.text(name)
        try:
            number = float(text) if text else None
        except ValueError:
            number = -1.0
        if number is not None and not least <= number <= 2**31:
            raise ConfigError(f"{name.replace('_', ' ')} must be a number from {least:g}, not {text!r:.100}")
        return number

    def whole(self, name: str, *, least: int = 1) -> int | None:
        """Return a whole number, ``None`` if the field is empty; raises ``ConfigError`` if it is not one."""
        number = self.number(name, least=least)
        if number is not None and not number.is_integer():
            raise ConfigError(f"{name.replace('_', ' ')} must be a whole number, not {number:g}")
        return None if number is None else int(number)


class Deed(NamedTuple):
    """An action: the path of its form, its name in :data:`bulltask.dashboard.access.ACTIONS`, and its function."""

    path: str
    name: str
    do: Callable[[Sent], str | Done]


def path(text: str) -> str:
    """Quote a name for a path, twice, because servers decode paths before routes see them, and names may have a "/"."""
    quoted = quote(quote(text, safe="", errors="surrogateescape"), safe="")
    return quoted if quoted.strip(".") else quoted.replace(".", "%252E")  # browsers resolve "..", and "%2E%2E", too


def param(request: Request, name: str) -> str:
    """Return a part of the path as :func:`path` has quoted it."""
    return unquote(request.path_params[name], errors="surrogateescape")


# ---- queues ----


def _pause(sent: Sent) -> str:
    name = sent.param("queue")
    sent.pages.app.queue(name).pause(by=f"{sent.user.name}, by the dashboard")
    return f"Queue {name} is paused."


def _resume(sent: Sent) -> str:
    name = sent.param("queue")
    sent.pages.app.queue(name).resume()
    return f"Queue {name} runs again."


def _limit(sent: Sent) -> str:
    """Set or remove the global concurrency and the global rate limit."""
    name = sent.param("queue")
    queue = sent.pages.app.queue(name)
    concurrency, max_jobs, seconds = sent.whole("concurrency"), sent.whole("jobs"), sent.number("seconds", least=0.001)
    if (max_jobs is None) != (seconds is None):
        raise ConfigError("a rate limit needs both its number of jobs and its seconds; leave both empty for none")
    if concurrency is None:
        queue.remove_global_concurrency()
    else:
        queue.set_global_concurrency(concurrency)
    if max_jobs is None or seconds is None:
        queue.remove_global_rate_limit()
        rate = "no rate limit"
    else:
        queue.set_global_rate_limit(max_jobs, seconds)
        rate = f"at most {max_jobs:,} jobs per {seconds:g} s"
    active = "any number of jobs" if concurrency is None else f"at most {concurrency:,} jobs at a time"
    return f"Queue {name} runs {active}, with {rate}."


def _end_limit(sent: Sent) -> str:
    name = sent.param("queue")
    was_limited = sent.pages.app.queue(name).remove_rate_limit_key()
    return f"The rate limit that was reached in queue {name} {'is over' if was_limited else 'was over already'}."


# ---- jobs ----


def _job(sent: Sent) -> Job:
    queue, job_id = sent.param("queue"), sent.param("job_id")
    job = sent.pages.app.queue(queue).get_job(job_id)
    if job is None:
        raise NotFound(f"Queue {queue} has no job {job_id}: it was removed, or never added.")
    return job


def _retry(sent: Sent) -> str:
    job = _job(sent)
    job.retry("completed" if job.is_completed() else "failed")
    return f"Job {job.id} waits again."


def _promote(sent: Sent) -> str:
    job = _job(sent)
    job.promote()
    return f"Job {job.id} waits for a worker."


def _remove(sent: Sent) -> str:
    job = _job(sent)
    job.remove()
    return f"Job {job.id} is removed."


def _revoke(sent: Sent) -> str:
    queue, job_id = sent.param("queue"), sent.param("job_id")
    return f"Job {job_id}: {sent.pages.app.queue(queue).revoke(job_id, terminate=True)}."


# ---- many jobs ----


def _count(action: str) -> Callable[[Sent], str | Done]:
    """Count the jobs that a change would change, and ask."""

    def act(sent: Sent) -> Done:
        wanted, age_h = Filter.of(sent.form), sent.number("older_than_h")
        older_than = None if age_h is None else age_h * 3_600
        queue, user = sent.param("queue"), sent.user.name
        change = sent.pages.changes.count(queue, action, wanted, older_than=older_than, user=user)
        change.wait(_COUNTED_AT_ONCE_S)
        return Done(f"counts the jobs to {action}: {wanted}", f"/changes/{change.id}", is_told=False)

    return act


def _run_change(action: str) -> Callable[[Sent], str | Done]:
    def act(sent: Sent) -> Done:
        change = _change(sent)
        if change.action != action:
            raise NotFound("There is no such change.")
        sent.pages.changes.run(change)
        change.wait(_COUNTED_AT_ONCE_S)
        outcome = f"{action} {change.matched:,} jobs of queue {change.queue}: {change.wanted}"
        return Done(outcome, f"/changes/{change.id}", is_told=False)

    return act


def _stop_change(sent: Sent) -> Done:
    change = _change(sent)
    change.stop()
    change.wait(_COUNTED_AT_ONCE_S)
    return Done(f"The change of queue {change.queue} is stopped.", f"/changes/{change.id}")


def _change(sent: Sent) -> Change:
    change = sent.pages.changes.get(sent.param("change"))
    if change is None:
        raise NotFound("There is no such change: it was long ago, or the dashboard was restarted.")
    return change


# ---- schedules ----


def _run_schedule(sent: Sent) -> Done:
    queue, scheduler_id = sent.param("queue"), sent.param("scheduler")
    job = sent.pages.app.queue(queue).schedulers.run_now(scheduler_id)
    if job is None:
        raise NotFound(f"Queue {queue} has no schedule {scheduler_id}.")
    return Done(f"Schedule {scheduler_id} has added this job.", f"/queues/{path(queue)}/jobs/{path(job.id)}")


def _remove_schedule(sent: Sent) -> Done:
    queue, scheduler_id = sent.param("queue"), sent.param("scheduler")
    if not sent.text("sure"):
        raise ConfigError("tick the box to remove the schedule")
    if not sent.pages.app.queue(queue).schedulers.remove(scheduler_id):
        raise NotFound(f"Queue {queue} has no schedule {scheduler_id}.")
    return Done(f"Schedule {scheduler_id} of queue {queue} is removed.", "/schedules")


# ---- workers ----

_ORDERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "pause": ("pause", {}),
    "resume": ("resume", {}),
    "replace": ("pool_restart", {}),
    "shutdown": ("shutdown", {"cold": False}),
}
_ORDER_TIMEOUT_S: Final = 2.0


def _control(sent: Sent) -> str:
    """Give an order to one worker, or to all."""
    order, worker = sent.text("order"), sent.text("worker")
    if worker and worker not in sent.pages.fleet()[0].states:
        raise NotFound(f"There is no worker {worker}: it has stopped.")
    if order in _ORDERS:
        name, arguments = _ORDERS[order]
    elif order in {"grow", "shrink"}:
        name, arguments = f"pool_{order}", {"n": sent.whole("n") or 1}
    elif order == "log_level" and sent.text("level") in LOG_LEVELS:
        name, arguments = order, {"level": sent.text("level")}
    else:
        raise ConfigError(f"there is no order {order!r:.100}")
    if order == "shutdown" and not sent.text("sure"):
        raise ConfigError("tick the box to stop the worker")
    control = sent.pages.app.control
    return _said(control.order(name, arguments, destination=[worker] if worker else None, timeout=_ORDER_TIMEOUT_S))


def _said(answers: Answers) -> str:
    said = [f"{worker}: {value}." for worker, value in sorted(answers.replies.items())]
    said += [f"{worker}: error: {error}." for worker, error in sorted(answers.errors.items())]
    said += [f"{worker}: no answer; the order was withdrawn." for worker in answers.withdrawn]
    said += [f"{worker}: no answer; it may have executed the order." for worker in answers.unanswered]
    said += [f"{name}: it is no longer alive." for name in answers.unknown]
    return " ".join(said) or "No worker is alive."


# ---- running a task ----


def _run_task(sent: Sent) -> Done:
    name = sent.text("task") if "task" not in sent.request.path_params else sent.param("task")
    task = sent.pages.app.tasks.get(name)
    if not name:
        raise Invalid({"task": "this is needed"})
    call = _plain_arguments(sent) if task is None else task_form(sent.pages.app, task).arguments(sent.form)
    options: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for option, read in (("countdown", sent.number), ("priority", lambda key: sent.whole(key, least=0))):
        try:
            options[option] = read(option)
        except ConfigError as exc:
            errors[option] = str(exc)
    if errors:
        raise Invalid(errors)
    options |= {"queue": sent.text("queue") or None, "job_id": sent.text("job_id") or None}
    given: Any = {option: value for option, value in options.items() if value is not None}
    try:
        job = sent.pages.app.send_task(name, call.args, call.kwargs, **given)
    except (BulltaskError, TypeError) as exc:
        raise Invalid({"": str(exc)}) from exc
    return Done(f"Job {job.id} was added.", f"/queues/{path(job.queue)}/jobs/{path(job.id)}")


def _plain_arguments(sent: Sent) -> Arguments:
    """Return the arguments for a task that this app does not have."""
    try:
        data = json.loads(sent.text("data") or "{}")
    except (ValueError, RecursionError) as exc:
        raise Invalid({"data": f"type JSON ({exc})"}) from exc
    if not isinstance(data, dict | list):
        raise Invalid({"data": "type a JSON object with the keyword arguments, or an array with the arguments"})
    return Arguments(data, {}) if isinstance(data, list) else Arguments((), data)


def form_of(pages: Pages, name: str) -> TaskForm | None:
    """Return the form of a task, ``None`` if the app does not have it."""
    task = pages.app.tasks.get(name)
    return None if task is None else task_form(pages.app, task)


_MANY: Final = ("retry", "promote", "revoke", "remove")

DEEDS: Final = (
    Deed("/queues/{queue}/pause", "pause", _pause),
    Deed("/queues/{queue}/resume", "resume", _resume),
    Deed("/queues/{queue}/limit", "limit", _limit),
    Deed("/queues/{queue}/end-limit", "limit", _end_limit),
    Deed("/queues/{queue}/retry/{job_id}", "retry", _retry),
    Deed("/queues/{queue}/promote/{job_id}", "promote", _promote),
    Deed("/queues/{queue}/revoke/{job_id}", "revoke", _revoke),
    Deed("/queues/{queue}/remove/{job_id}", "remove", _remove),
    *(Deed(f"/queues/{{queue}}/changes/{one}", one, _count(one)) for one in _MANY),
    *(Deed(f"/changes/{{change}}/{one}", one, _run_change(one)) for one in _MANY),
    Deed("/changes/{change}/stop", "stop", _stop_change),
    Deed("/queues/{queue}/schedules/{scheduler}/run", "run", _run_schedule),
    Deed("/queues/{queue}/schedules/{scheduler}/remove", "remove", _remove_schedule),
    Deed("/workers/control", "control", _control),
    Deed("/run", "run", _run_task),
    Deed("/run/{task}", "run", _run_task),
)
