"""What users can do from the dashboard: a function for each action does it, and returns what it has done.

:data:`ENDPOINTS` has their paths. Beforehand, :meth:`bulltask.dashboard.access.Access.may` decides whether the user's
role suffices.
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
from bulltask.dashboard.changes import JOB_CHANGES, Change
from bulltask.dashboard.forms import Arguments, Invalid, TaskForm, task_form
from bulltask.dashboard.pages import Filter, Pages
from bulltask.jobs.errors import BulltaskError, ConfigError, JobNotFoundError
from bulltask.queue.control import Answers, change_rate_limit
from bulltask.queue.fields import RateLimit
from bulltask.queue.search import Action

__all__ = [
    "ENDPOINTS",
    "Endpoint",
    "NotFound",
    "Outcome",
    "SentForm",
    "change_of",
    "form_of",
    "no_job",
    "param",
    "path",
]

_COUNTED_AT_ONCE_S: Final = 0.3
"""How long a reply waits for a count or a change, so that most need no page with their progress."""


class NotFound(Exception):
    """There is no such queue, job or page; ``past`` is the path of the page that may have it instead."""

    def __init__(self, message: str, past: str = "") -> None:
        super().__init__(message)
        self.past = past


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an action has done, and which page follows.

    Attributes:
        text: What it has done, for the audit log.
        path: The path of the page; ``None`` for that with the form.
        is_shown: Whether the page shows the text.
    """

    text: str
    path: str | None = None
    is_shown: bool = True


class SentForm(NamedTuple):
    """A form that a user has sent."""

    pages: Pages
    user: User
    request: Request
    fields: FormData

    @property
    def by(self) -> str:
        """Who has sent it, for pauses."""
        return f"{self.user.name}, by the dashboard"

    def param(self, name: str) -> str:
        """Return a part of the path."""
        return param(self.request, name)

    def text(self, name: str) -> str:
        """Return a field, ``""`` if it was not sent."""
        return str(self.fields.get(name, "")).strip()

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


Handler = Callable[[SentForm], str | Outcome]


class Endpoint(NamedTuple):
    """Where a form is sent: its path, its action in :data:`bulltask.dashboard.access.ACTIONS`, and what executes it."""

    path: str
    action: str
    handle: Handler


def path(text: str) -> str:
    """Quote a name for a path, twice, because servers decode paths before routes see them, and names may have a "/"."""
    quoted = quote(quote(text, safe="", errors="surrogateescape"), safe="")
    return quoted if quoted.strip(".") else quoted.replace(".", "%252E")  # browsers resolve "..", and "%2E%2E", too


def param(request: Request, name: str) -> str:
    """Return a part of the path as :func:`path` has quoted it."""
    return unquote(request.path_params[name], errors="surrogateescape")


def no_job(queue: str, job_id: str, past: str = "") -> NotFound:
    """Return the error for a job that a queue does not have."""
    return NotFound(f"Queue {queue} has no job {job_id}: it was removed, or never added.", past)


def change_of(pages: Pages, request: Request) -> Change:
    """Return the change of many jobs that a path names."""
    change = pages.changes.get(param(request, "change"))
    if change is None:
        raise NotFound("There is no such change: it was long ago, or the dashboard was restarted.")
    return change


# ---- queues ----


def _pause(form: SentForm) -> str:
    name = form.param("queue")
    form.pages.app.queue(name).pause(by=form.by)
    return f"Queue {name} is paused."


def _resume(form: SentForm) -> str:
    name = form.param("queue")
    form.pages.app.queue(name).resume()
    return f"Queue {name} runs again."


def _limit(form: SentForm) -> str:
    """Set or remove the global concurrency and the global rate limit."""
    name = form.param("queue")
    queue = form.pages.app.queue(name)
    concurrency, max_jobs, seconds = form.whole("concurrency"), form.whole("jobs"), form.number("seconds", least=0.001)
    if (max_jobs is None) != (seconds is None):
        raise ConfigError("a rate limit needs both its number of jobs and its seconds; leave both empty for none")
    if concurrency is None:
        queue.remove_global_concurrency()
    else:
        queue.set_global_concurrency(concurrency)
    limit = None if max_jobs is None or seconds is None else RateLimit(max_jobs, seconds)
    change_rate_limit(queue, limit)
    rate = "no rate limit" if limit is None else f"at most {limit.max:,} jobs per {limit.duration:g} s"
    active = "any number of jobs" if concurrency is None else f"at most {concurrency:,} jobs at a time"
    return f"Queue {name} runs {active}, with {rate}."


def _end_limit(form: SentForm) -> str:
    name = form.param("queue")
    was_limited = form.pages.app.queue(name).remove_rate_limit_key()
    return f"The rate limit that was reached in queue {name} {'is over' if was_limited else 'was over already'}."


# ---- jobs ----


def _change_job(action: str) -> Callable[[SentForm], str]:
    """Change one job."""

    def act(form: SentForm) -> str:
        queue, job_id = form.param("queue"), form.param("job_id")
        try:
            return JOB_CHANGES[action](form.pages.app.queue(queue), job_id)
        except JobNotFoundError as exc:
            raise no_job(queue, job_id) from exc

    return act


# ---- many jobs ----


def _count(action: str) -> Handler:
    """Count the jobs that a change would change, and ask."""

    def act(form: SentForm) -> Outcome:
        wanted, age_h = Filter.of(form.fields), form.number("older_than_h")
        older_than = None if age_h is None else age_h * 3_600
        queue, user = form.param("queue"), form.user.name
        change = form.pages.changes.count(queue, action, wanted, older_than=older_than, user=user)
        change.wait(_COUNTED_AT_ONCE_S)
        return Outcome(f"counts the jobs to {action}: {wanted}", f"/changes/{change.id}", is_shown=False)

    return act


def _run_change(action: str) -> Handler:
    def act(form: SentForm) -> Outcome:
        change = change_of(form.pages, form.request)
        if change.action != action:
            raise NotFound("There is no such change.")
        form.pages.changes.run(change)
        change.wait(_COUNTED_AT_ONCE_S)
        outcome = f"{action} {change.matched:,} jobs of queue {change.queue}: {change.wanted}"
        return Outcome(outcome, f"/changes/{change.id}", is_shown=False)

    return act


def _stop_change(form: SentForm) -> Outcome:
    change = change_of(form.pages, form.request)
    change.stop()
    change.wait(_COUNTED_AT_ONCE_S)
    return Outcome(f"The change of queue {change.queue} is stopped.", f"/changes/{change.id}")


# ---- schedules ----


def _no_schedule(queue: str, scheduler_id: str) -> NotFound:
    return NotFound(f"Queue {queue} has no schedule {scheduler_id}.")


def _run_schedule(form: SentForm) -> Outcome:
    queue, scheduler_id = form.param("queue"), form.param("scheduler")
    job = form.pages.app.queue(queue).schedulers.run_now(scheduler_id)
    if job is None:
        raise _no_schedule(queue, scheduler_id)
    return Outcome(f"Schedule {scheduler_id} has added this job.", f"/queues/{path(queue)}/jobs/{path(job.id)}")


def _pause_schedule(form: SentForm) -> str:
    queue, scheduler_id = form.param("queue"), form.param("scheduler")
    if form.pages.app.queue(queue).schedulers.pause(scheduler_id, by=form.by) is None:
        raise _no_schedule(queue, scheduler_id)
    return f"Schedule {scheduler_id} of queue {queue} is paused."


def _resume_schedule(form: SentForm) -> str:
    queue, scheduler_id = form.param("queue"), form.param("scheduler")
    if form.pages.app.queue(queue).schedulers.resume(scheduler_id) is None:
        raise _no_schedule(queue, scheduler_id)
    return f"Schedule {scheduler_id} of queue {queue} adds jobs again."


def _remove_schedule(form: SentForm) -> Outcome:
    queue, scheduler_id = form.param("queue"), form.param("scheduler")
    if not form.text("sure"):
        raise ConfigError("tick the box to remove the schedule")
    if not form.pages.app.queue(queue).schedulers.remove(scheduler_id):
        raise _no_schedule(queue, scheduler_id)
    return Outcome(f"Schedule {scheduler_id} of queue {queue} is removed.", "/schedules")


# ---- workers ----

_ORDERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "pause": ("pause", {}),
    "resume": ("resume", {}),
    "replace": ("pool_restart", {}),
    "shutdown": ("shutdown", {"cold": False}),
}
_ORDER_TIMEOUT_S: Final = 2.0


def _control(form: SentForm) -> str:
    """Give an order to one worker, or to all."""
    order, worker = form.text("order"), form.text("worker")
    if worker and worker not in form.pages.fleet()[0].states:
        raise NotFound(f"There is no worker {worker}: it has stopped.")
    if order in _ORDERS:
        name, arguments = _ORDERS[order]
    elif order in {"grow", "shrink"}:
        name, arguments = f"pool_{order}", {"n": form.whole("n") or 1}
    elif order == "log_level" and form.text("level") in LOG_LEVELS:
        name, arguments = order, {"level": form.text("level")}
    else:
        raise ConfigError(f"there is no order {order!r:.100}")
    if order == "shutdown" and not form.text("sure"):
        raise ConfigError("tick the box to stop the worker")
    control = form.pages.app.control
    return _summary(control.order(name, arguments, destination=[worker] if worker else None, timeout=_ORDER_TIMEOUT_S))


def _summary(answers: Answers) -> str:
    said = [f"{worker}: {value}." for worker, value in sorted(answers.replies.items())]
    said += [f"{worker}: error: {error}." for worker, error in sorted(answers.errors.items())]
    said += [f"{worker}: no answer; the order was withdrawn." for worker in answers.withdrawn]
    said += [f"{worker}: no answer; it may have executed the order." for worker in answers.unanswered]
    said += [f"{name}: it is no longer alive." for name in answers.unknown]
    return " ".join(said) or "No worker is alive."


# ---- running a task ----


def _run_task(form: SentForm) -> Outcome:
    name = form.text("task") if "task" not in form.request.path_params else form.param("task")
    if not name:
        raise Invalid({"task": "required"})
    task = form_of(form.pages, name)
    call = _plain_arguments(form) if task is None else task.arguments(form.fields)
    options: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for option, read in (("countdown", form.number), ("priority", lambda key: form.whole(key, least=0))):
        try:
            options[option] = read(option)
        except ConfigError as exc:
            errors[option] = str(exc)
    if errors:
        raise Invalid(errors)
    options |= {"queue": form.text("queue") or None, "job_id": form.text("job_id") or None}
    given: Any = {option: value for option, value in options.items() if value is not None}
    try:
        job = form.pages.app.send_task(name, call.args, call.kwargs, **given)
    except (BulltaskError, TypeError) as exc:
        raise Invalid({"": str(exc)}) from exc
    return Outcome(f"Job {job.id} was added.", f"/queues/{path(job.queue)}/jobs/{path(job.id)}")


def _plain_arguments(form: SentForm) -> Arguments:
    """Return the arguments for a task that this app does not have."""
    try:
        data = json.loads(form.text("data") or "{}")
    except (ValueError, RecursionError) as exc:
        raise Invalid({"data": f"enter JSON ({exc})"}) from exc
    if not isinstance(data, dict | list):
        raise Invalid({"data": "enter a JSON object with the keyword arguments, or an array with the arguments"})
    return Arguments(data, {}) if isinstance(data, list) else Arguments((), data)


def form_of(pages: Pages, name: str) -> TaskForm | None:
    """Return the form of a task, ``None`` if the app does not have it."""
    task = pages.app.tasks.get(name)
    return None if task is None else task_form(pages.app, task)


ENDPOINTS: Final = (
    Endpoint("/queues/{queue}/pause", "pause", _pause),
    Endpoint("/queues/{queue}/resume", "resume", _resume),
    Endpoint("/queues/{queue}/limit", "limit", _limit),
    Endpoint("/queues/{queue}/end-limit", "limit", _end_limit),
    *(Endpoint(f"/queues/{{queue}}/{one}/{{job_id}}", one, _change_job(one)) for one in JOB_CHANGES),
    *(Endpoint(f"/queues/{{queue}}/changes/{one}", one, _count(one)) for one in Action),
    *(Endpoint(f"/changes/{{change}}/{one}", one, _run_change(one)) for one in Action),
    Endpoint("/changes/{change}/stop", "stop", _stop_change),
    Endpoint("/queues/{queue}/schedules/{scheduler}/run", "run", _run_schedule),
    Endpoint("/queues/{queue}/schedules/{scheduler}/pause", "pause", _pause_schedule),
    Endpoint("/queues/{queue}/schedules/{scheduler}/resume", "resume", _resume_schedule),
    Endpoint("/queues/{queue}/schedules/{scheduler}/remove", "remove", _remove_schedule),
    Endpoint("/workers/control", "control", _control),
    Endpoint("/run", "run", _run_task),
    Endpoint("/run/{task}", "run", _run_task),
)
