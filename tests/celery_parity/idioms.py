"""One-line idioms of Celery, as an ordinary project contains them. A line works if it raises nothing and is not false.

The lines are written for Celery 5.7, where each of them works: ``python -m tests.celery_parity.idioms redis://…`` in
an environment that has Celery. For bulltask, the command in the README of `examples/from_celery` changes the imports.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["IDIOMS", "MISSING", "SETUP", "for_bulltask", "outcomes"]

SETUP: Final = """
import uuid
from datetime import datetime, timedelta, timezone
from celery import Celery, chain, chord, group, shared_task
from celery.utils.log import get_task_logger

app = Celery("idioms", broker=URL, backend=URL)
app.conf.update(task_default_queue="idioms", result_expires=3600)
logger = get_task_logger(__name__)

def new(): return Celery("new", broker=URL, set_as_current=False)
def fn(): return 1
def fn_self(self): return 1
@app.task
def add(x, y): return x + y
@app.task
def mul(x, y): return x * y
@app.task
def xsum(numbers): return sum(numbers)
@app.task
def boom(*args): raise ValueError("boom")
@app.task(ignore_result=True)
def quiet(*args): return None
@shared_task
def shared(x): return x
@app.task(bind=True)
def ask(self, code): return eval(code, {"self": self})
@app.task(bind=True, max_retries=2, default_retry_delay=0)
def again(self, times):
    if self.request.retries < times: raise self.retry(countdown=0)
    return self.request.retries
"""
"""What the lines have in common; ``URL`` is the server's."""

IDIOMS: Final = """
# the app
Celery("a", broker=URL, set_as_current=False)
Celery("a", broker=URL, backend=URL, include=["json"], set_as_current=False)
Celery("a", broker=URL, backend="rpc://", set_as_current=False)
Celery(broker=URL, set_as_current=False)
Celery("a", broker=URL, set_as_current=False)
Celery("a", broker=URL, task_ignore_result=True, set_as_current=False)
app.main == "idioms"
new().conf.task_serializer = "json"
new().conf["result_serializer"] = "json"
new().conf.update(task_serializer="json", accept_content=["json"], timezone="UTC", enable_utc=True)
new().config_from_object({"timezone": "UTC"})
new().config_from_object({"CELERY_TIMEZONE": "UTC"}, namespace="CELERY")
new().config_from_envvar("NOT_SET", silent=True) in (None, False)
new().conf.task_always_eager == False
new().conf.broker_connection_retry_on_startup
new().conf.worker_prefetch_multiplier = 1
new().conf.task_acks_late = True
new().conf.broker_transport_options = {"visibility_timeout": 3600}
new().conf.task_track_started = True
new().conf.worker_max_tasks_per_child = 100
conf = new().conf; conf.task_time_limit, conf.task_soft_time_limit = 300, 240
new().conf.result_backend
app.autodiscover_tasks(["json"])
app.autodiscover_tasks(["json"], related_name="decoder")
app.autodiscover_tasks(lambda: ["json"])
"add" in {name.rpartition(".")[2] for name in app.tasks}
app.tasks[add.name] is not None
app.set_default()
app.set_current()
from celery import current_app
from celery import current_app; current_app.conf.timezone

# tasks
app.task(name="t.name")(fn)
app.task(bind=True, name="t.bound")(fn_self)
app.task(name="t.queue", queue="high")(fn)
app.task(name="t.retries", max_retries=5, default_retry_delay=60)(fn)
app.task(name="t.unlimited", max_retries=None)(fn)
app.task(name="t.auto", autoretry_for=(Exception,), retry_backoff=True, retry_kwargs={"max_retries": 5})(fn)
app.task(name="t.backoff", autoretry_for=(OSError,), retry_backoff=5, retry_backoff_max=700, retry_jitter=False)(fn)
app.task(name="t.except", autoretry_for=(Exception,), dont_autoretry_for=(KeyError,))(fn)
app.task(name="t.throws", throws=(KeyError,))(fn)
app.task(name="t.limits", time_limit=30, soft_time_limit=20)(fn)
app.task(name="t.rate", rate_limit="10/m")(fn)
app.task(name="t.acks", acks_late=True, reject_on_worker_lost=True)(fn)
app.task(name="t.started", track_started=True)(fn)
app.task(name="t.ignores", ignore_result=True)(fn)
app.task(name="t.priority", priority=5)(fn)
app.task(name="t.expires", expires=60)(fn)
app.task(name="t.serializer", serializer="json")(fn)
app.task(name="t.pydantic", pydantic=True)(fn)
app.task(name="t.typing", typing=True)(fn)
app.task(name="t.trail", trail=True)(fn)
shared_task(name="t.shared")(fn)
shared_task(bind=True, name="t.shared_bound", autoretry_for=(OSError,), retry_backoff=True)(fn_self)
from celery import Task
from celery import Task; Base = type("Base", (Task,), {"abstract": True}); app.task(base=Base, name="t.base")(fn)
from celery import Task; Celery("a", broker=URL, set_as_current=False, task_cls=Task)
add.name.endswith("add")
add(2, 3) == 5
add.run(2, 3) == 5
add.max_retries == 3
add.app is app
add.__name__ == "add"
shared.delay(1).get(timeout=9) == 1
quiet.delay().get(timeout=9) is None

# calls
add.delay(2, 3).get(timeout=9) == 5
add.delay(x=2, y=3).get(timeout=9) == 5
add.apply_async((2, 3)).get(timeout=9) == 5
add.apply_async(args=[2, 3]).get(timeout=9) == 5
add.apply_async(kwargs={"x": 2, "y": 3}).get(timeout=9) == 5
add.apply_async(args=(2,), kwargs={"y": 3}).get(timeout=9) == 5
add.apply_async((2, 3), countdown=0.1).get(timeout=9) == 5
add.apply_async((2, 3), eta=datetime.now(timezone.utc)).get(timeout=9) == 5
add.apply_async((2, 3), expires=60).get(timeout=9) == 5
add.apply_async((2, 3), expires=datetime.now(timezone.utc) + timedelta(days=1)).get(timeout=9) == 5
add.apply_async((2, 3), queue="idioms").get(timeout=9) == 5
add.apply_async((2, 3), priority=3).get(timeout=9) == 5
add.apply_async((2, 3), headers={"trace": "1"}).get(timeout=9) == 5
add.apply_async((2, 3), serializer="json").get(timeout=9) == 5
add.apply_async((2, 3), compression="gzip").get(timeout=9) == 5
add.apply_async((2, 3), ignore_result=True)
add.apply_async((2, 3), task_id=str(uuid.uuid4())).get(timeout=9) == 5
add.apply_async((2, 3), time_limit=10, soft_time_limit=5).get(timeout=9) == 5
add.apply_async((2, 3), retry=True, retry_policy={"max_retries": 3}).get(timeout=9) == 5
add.apply_async((2, 3), link=mul.s(2)).get(timeout=9) == 5
add.apply_async((2, 3), link=[mul.s(2), mul.s(3)]).get(timeout=9) == 5
add.apply_async((2, 3), link_error=boom.s()).get(timeout=9) == 5
app.send_task(add.name, args=[2, 3]).get(timeout=9) == 5
app.send_task(add.name, kwargs={"x": 2, "y": 3}).get(timeout=9) == 5
app.send_task(add.name, (2, 3), queue="idioms", countdown=0.1).get(timeout=9) == 5
add.apply((2, 3)).get() == 5
add.apply(args=(2, 3)).result == 5
boom.apply().failed()
add.apply_async((2, 3), routing_key="idioms").get(timeout=9) == 5
add.apply_async((2, 3), shadow="shown name").get(timeout=9) == 5
again.delay(1).get(timeout=9) == 1
again.apply_async((2,), max_retries=5)

# self of a bound task
ask.delay("self.request.id").get(timeout=9)
ask.delay("self.request.retries").get(timeout=9) == 0
ask.delay("self.name").get(timeout=9) == ask.name
ask.delay("self.request.task").get(timeout=9) == ask.name
ask.delay("self.request.hostname").get(timeout=9)
ask.delay("self.request.delivery_info['routing_key']").get(timeout=9)
ask.delay("self.request.called_directly").get(timeout=9) is False
ask.delay("self.request.root_id").get(timeout=9)
ask.delay("self.request.is_eager").get(timeout=9) is False
ask.delay("self.request.eta").get(timeout=9) is None
ask.delay("self.request.expires").get(timeout=9) is None
ask.delay("self.request.correlation_id").get(timeout=9)
ask.delay("self.max_retries").get(timeout=9) == 3
ask.delay("self.app.main").get(timeout=9) == "idioms"
ask.delay("self.update_state(state='PROGRESS', meta={'current': 1, 'total': 2})").get(timeout=9) is None
ask.delay("self.update_state(task_id=self.request.id, state='PROGRESS')").get(timeout=9) is None
ask.delay("self.AsyncResult(self.request.id).id").get(timeout=9)
ask.delay("self.s('1').task").get(timeout=9) == ask.name

# signatures
add.s(2, 3).delay().get(timeout=9) == 5
add.s(2).delay(3).get(timeout=9) == 5
add.si(2, 3).delay().get(timeout=9) == 5
add.s(2, y=3)().real == 5
add.s(2, 3).apply_async(countdown=0.1).get(timeout=9) == 5
add.s(2, 3).set(queue="idioms").delay().get(timeout=9) == 5
add.s(2, 3).set(countdown=0.1, priority=1).apply_async().get(timeout=9) == 5
add.s(2, 3).apply().get() == 5
add.signature((2, 3)).delay().get(timeout=9) == 5
add.signature((2, 3), countdown=0.1).delay().get(timeout=9) == 5
add.signature((2, 3), immutable=True).delay().get(timeout=9) == 5
add.subtask((2, 3)).delay().get(timeout=9) == 5
app.signature(add.name, args=(2, 3)).delay().get(timeout=9) == 5
from celery import signature; signature(add.name, args=(2, 3)).delay().get(timeout=9) == 5
from celery import signature; signature(add.name, args=(2, 3), app=app, countdown=0.1).delay().get(timeout=9) == 5
add.s(2, 3).args == (2, 3)
add.s(2, y=3).kwargs == {"y": 3}
add.s(2, 3).task == add.name
add.s(2, 3).options == {}
add.s(2, 3).clone().delay().get(timeout=9) == 5
add.s(2, 3) == add.s(2, 3)
add.s(2, 3).id is None

# canvas
chain(add.s(2, 3), mul.s(4))().get(timeout=9) == 20
chain(add.s(2, 3), mul.s(4)).apply_async().get(timeout=9) == 20
chain([add.s(2, 3), mul.s(4)]).delay().get(timeout=9) == 20
(add.s(2, 3) | mul.s(4)).apply_async().get(timeout=9) == 20
(add.s(2, 3) | mul.s(4))().parent.get(timeout=9) == 5
(add.s(3) | mul.s(4)).delay(2).get(timeout=9) == 20
chain(add.si(1, 1), add.si(2, 2), add.si(3, 3))().get(timeout=9) == 6
chain(add.s(2, 3), mul.s(4)).apply_async(countdown=0.1).get(timeout=9) == 20
chain(add.s(2, 3), mul.s(4)).apply_async(link_error=boom.s()).get(timeout=9) == 20
chain(*[add.s(1, 1)] + [add.s(1)] * 3)().get(timeout=9) == 5
len(chain(add.s(2, 3), mul.s(4)).tasks) == 2
group(add.s(1, 1), add.s(2, 2))().get(timeout=9) == [2, 4]
group([add.s(1, 1), add.s(2, 2)]).apply_async().get(timeout=9) == [2, 4]
group(add.s(i, i) for i in range(3))().get(timeout=9) == [0, 2, 4]
group(add.s(i, i) for i in range(3)).delay().join(timeout=9) == [0, 2, 4]
group(add.s(1), add.s(2)).delay(10).get(timeout=9) == [11, 12]
group([add.s(1, 1)]).apply_async(queue="idioms").get(timeout=9) == [2]
len(group(add.s(1, 1), add.s(2, 2)).tasks) == 2
chord([add.s(1, 1), add.s(2, 2)])(xsum.s()).get(timeout=9) == 6
chord([add.s(1, 1), add.s(2, 2)], xsum.s())().get(timeout=9) == 6
chord((add.s(i, i) for i in range(3)), xsum.s()).apply_async().get(timeout=9) == 6
chord([add.s(1, 1)], xsum.si([7])).delay().get(timeout=9) == 7
chord(header=[add.s(1, 1)], body=xsum.s())().get(timeout=9) == 2
chord([add.s(1, 1), add.s(2, 2)], xsum.s().on_error(boom.s()))().get(timeout=9) == 6
(group(add.s(1, 1), add.s(2, 2)) | xsum.s())().get(timeout=9) == 6
(add.s(1, 1) | group(add.s(1), add.s(2)) | xsum.s())().get(timeout=9) == 7
chain(group(add.s(1, 1), add.s(2, 2)), xsum.s(), mul.s(2))().get(timeout=9) == 12
xsum.map([[1, 2], [3]]).delay().get(timeout=9) == [3, 3]
add.starmap([(1, 2), (3, 4)]).apply_async().get(timeout=9) == [3, 7]
add.chunks([(1, 2), (3, 4), (5, 6)], 2)().get(timeout=9) == [[3, 7], [11]]
add.chunks(zip(range(4), range(4)), 2).group()().get(timeout=9) == [[0, 2], [4, 6]]
add.s(2, 3).link(mul.s(2)) is not None
add.s(2, 3).link_error(boom.s()) is not None
add.s(2, 3).on_error(boom.s()).delay().get(timeout=9) == 5
from celery.canvas import Signature, chain, chord, group
group(add.si(1, 1), chain(add.s(1, 1), mul.s(3)))().get(timeout=9) == [2, 6]

# results
add.delay(2, 3).id
str(add.delay(2, 3))
add.delay(2, 3).task_id
add.delay(2, 3).get(timeout=9, propagate=False) == 5
add.delay(2, 3).get(timeout=9, interval=0.1) == 5
add.delay(2, 3).wait(timeout=9) == 5
(lambda r: r.get(timeout=9) and r.ready() and r.successful() and not r.failed())(add.delay(2, 3))
(lambda r: r.get(timeout=9) and r.state == "SUCCESS" and r.status == "SUCCESS")(add.delay(2, 3))
(lambda r: r.get(timeout=9) and r.result == 5 and r.info == 5)(add.delay(2, 3))
isinstance(boom.delay().get(timeout=9, propagate=False), ValueError)
(lambda r: r.get(timeout=9, propagate=False) and r.state == "FAILURE")(boom.delay())
(lambda r: r.get(timeout=9, propagate=False) and "ValueError" in r.traceback)(boom.delay())
(lambda r: r.get(timeout=9, propagate=False) and isinstance(r.result, ValueError))(boom.delay())
add.AsyncResult(add.delay(2, 3).id).get(timeout=9) == 5
app.AsyncResult(add.delay(2, 3).id).get(timeout=9) == 5
from celery.result import AsyncResult; AsyncResult(add.delay(2, 3).id).get(timeout=9) == 5
from celery.result import AsyncResult; AsyncResult(add.delay(2, 3).id, app=app).get(timeout=9) == 5
from celery.result import AsyncResult; AsyncResult("no such id").state == "PENDING"
add.delay(2, 3).forget() is None
add.apply_async((2, 3), countdown=60).revoke()
app.control.revoke(add.apply_async((2, 3), countdown=60).id)
app.control.revoke(add.apply_async((2, 3), countdown=60).id, terminate=True)
from celery.result import GroupResult
(lambda r: r.save() or GroupResult.restore(r.id, app=app).get(timeout=9) == [2])(group([add.s(1, 1)])())
(lambda r: r.get(timeout=9) and r.completed_count() == 2)(group(add.s(1, 1), add.s(2, 2))())
(lambda r: r.get(timeout=9) and r.successful() and r.ready())(group(add.s(1, 1), add.s(2, 2))())
[r.get(timeout=9) for r in group(add.s(1, 1), add.s(2, 2))().results] == [2, 4]
[r.get(timeout=9) for r in group(add.s(1, 1), add.s(2, 2))().children] == [2, 4]
from celery.result import ResultSet; ResultSet([add.delay(1, 1), add.delay(2, 2)]).get(timeout=9) == [2, 4]
from celery.result import allow_join_result
list(add.delay(2, 3).collect()) != []
add.delay(2, 3) != add.delay(2, 3)

# errors and states
from celery.exceptions import MaxRetriesExceededError, Retry
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from celery.exceptions import Ignore, Reject
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError
from celery.exceptions import ImproperlyConfigured
from celery.exceptions import OperationalError
from celery import states; states.SUCCESS == "SUCCESS"
from celery.states import FAILURE, PENDING, READY_STATES; FAILURE in READY_STATES and PENDING not in READY_STATES

# routes and schedules
new().conf.task_routes = {"feed.tasks.*": {"queue": "feeds"}}
new().conf.task_routes = ({"feed.*": "feeds"},)
app.conf.task_default_queue
new().conf.task_annotations = {"*": {"rate_limit": "10/s"}}
from celery.schedules import crontab
from celery.schedules import crontab; crontab(minute="*/15")
from celery.schedules import crontab; crontab(hour=7, minute=30, day_of_week=1)
from celery.schedules import crontab; crontab(0, 0, day_of_month="2-30/2")
from celery.schedules import crontab; new().conf.beat_schedule = {"a": {"task": "t", "schedule": crontab(minute=0)}}
new().conf.beat_schedule = {"a": {"task": "t.a", "schedule": 30.0}}
new().conf.beat_schedule = {"a": {"task": "t.a", "schedule": timedelta(seconds=30), "args": (1,)}}
from celery.schedules import schedule; new().conf.beat_schedule = {"a": {"task": "t.a", "schedule": schedule(30)}}
app.add_periodic_task(10.0, add.s(1, 2), name="add every 10")
app.on_after_configure.connect(lambda sender, **kwargs: None)
app.on_after_finalize.connect(lambda sender, **kwargs: None)

# signals and logging
from celery.signals import task_prerun, task_postrun, task_success, task_failure, task_retry, task_revoked
from celery.signals import worker_ready, worker_shutdown, worker_init, worker_process_init, worker_process_shutdown
from celery.signals import before_task_publish, after_task_publish
from celery.signals import setup_logging
from celery.signals import after_setup_logger, after_setup_task_logger
from celery.signals import task_received, task_unknown
from celery.signals import celeryd_init, celeryd_after_setup
from celery.signals import beat_init
from celery.signals import task_prerun; task_prerun.connect(lambda sender=None, **kwargs: None, weak=False)
from celery.signals import task_failure; task_failure.connect(lambda **kwargs: None, sender=add, weak=False)
from celery import signals; signals.task_postrun.connect(lambda **kwargs: None, weak=False)
logger.info("adding %s and %s", 1, 2)
from celery.utils.log import get_task_logger; get_task_logger(__name__).name == __name__
from celery import current_task; current_task is not None

# control and testing
app.control.inspect() is not None
app.control.inspect().active() is not None
app.control.ping(timeout=1) is not None
app.control.purge() >= 0
new().conf.task_always_eager = False
new().conf.task_eager_propagates = True
"""

MISSING: Final = {
    "new().conf.broker_connection_retry_on_startup": "always on",
    "new().conf.result_backend": "a job stores its result",
    "add.max_retries == 3": "the option as given; self.max_retries is that of the running job",
    'add.apply_async((2, 3), routing_key="idioms").get(timeout=9) == 5': "use queue=; the error says so",
    'ask.delay("self.max_retries").get(timeout=9) == 3': "2 by default, see task_max_retries",
    "ask.delay(\"self.s('1').task\").get(timeout=9) == ask.name": "it is the task",
    "add.s(2, 3).task == add.name": "it is the task",
    "add.s(2, 3).options == {}": "an object",
    "add.s(2, 3) == add.s(2, 3)": "compare their attributes",
    "add.s(2, 3).id is None": "a job has its id when it is sent",
    "add.chunks(zip(range(4), range(4)), 2).group()().get(timeout=9) == [[0, 2], [4, 6]]": "chunks() returns a group",
    "[r.get(timeout=9) for r in group(add.s(1, 1), add.s(2, 2))().children] == [2, 4]": "they are the results",
    "from celery.signals import after_setup_logger, after_setup_task_logger": "the error names an alternative",
    "from celery.signals import task_received, task_unknown": "the error names an alternative",
    "from celery.signals import celeryd_init, celeryd_after_setup": "the error names an alternative",
    "from celery.signals import beat_init": "the error names an alternative",
    "app.control.inspect().active() is not None": "the worker of the test runs in its process, without a supervisor",
}
"""The lines that do not work in bulltask, and why."""


_README: Final = Path(__file__).parents[2] / "examples/from_celery/README.md"


def lines() -> list[str]:
    """Return the idioms."""
    return [line for line in IDIOMS.splitlines() if line and not line.startswith("#")]


def for_bulltask(code: str) -> str:
    """Change the imports with the command in the README of `examples/from_celery`."""
    (script,) = re.findall(r"sed -E -i '(.*?)' {} \+", _README.read_text(), re.DOTALL)
    return subprocess.run(["sed", "-E", script], input=code, capture_output=True, text=True, check=True).stdout


def outcomes(url: str, translate: Callable[[str], str], prepare: Callable[[Any], Any]) -> dict[str, str]:
    """Run all lines; return what went wrong by line, ``""`` for one that works.

    Args:
        url: The server.
        translate: Changes the imports of one or more lines.
        prepare: Called with the app, before the first line.
    """
    names: dict[str, Any] = {"URL": url, "__name__": "idioms"}
    exec(translate(SETUP), names)
    prepare(names["app"])
    translated = translate("\n".join(lines())).splitlines()
    return {line: _outcome(code, names) for line, code in zip(lines(), translated, strict=True)}


def _outcome(code: str, names: dict[str, Any]) -> str:
    *statements, last = code.split("; ")
    try:
        for statement in statements:
            exec(statement, names)
        with suppress(SyntaxError):
            compile(last, "", "eval")
            return "" if eval(last, names) is not False else "it is false"
        exec(last, names)
    except Exception as exc:  # noqa: BLE001 - a miss
        return f"{type(exc).__name__}: {exc}"
    return ""


def main(url: str) -> None:
    """Print the lines that do not work in Celery."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "idioms.py").write_text(SETUP.replace("URL", repr(url)))
        command = [sys.executable, "-m", "celery", "-A", "idioms", "worker", "-Q", "idioms", "-c", "1", "-l", "ERROR"]
        with subprocess.Popen(command, cwd=directory) as worker:
            found = outcomes(url, str, lambda app: None)
            worker.terminate()
    failed = {line: text for line, text in found.items() if text}
    for line, text in failed.items():
        print(f"{line}\n    {text}")  # noqa: T201
    print(f"{len(found) - len(failed)} of {len(found)} work")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
