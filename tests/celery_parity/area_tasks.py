"""Tasks: definitions, calls, arguments, options, the request, and processes that die."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from tests.celery_parity.scenario import Area

AREA = Area("Tasks and calls")
same, better, differs = AREA.same, AREA.better, AREA.differs


OPTIONS_OF_MESSAGES = {
    "retry": False,
    "retry_policy": {"max_retries": 1},
    "shadow": "shown",
    "add_to_parent": False,
    "argsrepr": "(…)",
    "delivery_mode": 1,
}


def one():
    return 1


def two():
    return 2


def twice(x):
    return 2 * x


# ---- definitions -----------------------------------------------------------------------------------------------------

same("A task keeps the docstring of its function.", "Return x.", lambda p: p.plain.__doc__)
same("A task's default name is `module.function`.", "tests.celery_parity.tasks.plain", lambda p: p.plain.name)
same("`name=` sets the name.", "named.by.hand", lambda p: p.renamed.name)
same("`app.tasks` finds a task by its name.", True, lambda p: p.app.tasks["named.by.hand"] is not None)
same("Calling a task runs its function in this process.", 5, lambda p: p.add(2, 3))
same(
    "In a bound task that is called directly, `self.request.called_directly` is true.",
    [True],
    lambda p: p.request(["called_directly"]),
)
same("`shared_task` defines a task without an app.", 4, lambda p: p.shared_task(twice)(2))
same(
    "In a bound task, `self.name` is the task's name.",
    True,
    lambda p: p.get(p.attribute_of_self.delay("name")) == p.attribute_of_self.name,
)
differs(
    "In a bound task, `self.max_retries` is the task's option, 3 by default.",
    (3, 2),
    "it is the running job's maximum, by default `task_max_retries` (2)",
    lambda p: p.get(p.attribute_of_self.delay("max_retries")),
)
same(
    "A bound task can send itself with `self.apply_async`.",
    ["1", "0"],
    lambda p: p.sends_itself.delay(p.key) and p.notes(2),
)
same(
    "`self.AsyncResult(id)` is a handle for any task.",
    True,
    lambda p: p.get(p.sends_itself.delay(p.key, 0)),
)
same(
    "`app.current_task` is the running task, for functions that it calls.",
    True,
    lambda p: p.get(p.attribute_of_current_task.delay("name")) == p.attribute_of_current_task.name,
)
same("Outside of a task, `current_task` equals `None`.", True, lambda p: p.current_task == None)  # noqa: E711
same("Outside of a task, `app.current_task` is `None`.", None, lambda p: p.app.current_task)
better(
    "A second function with the name of a task is ignored.",
    ([1, 1], "DuplicateTaskError"),
    "bulltask raises an error; otherwise, one of the functions would never run",
    lambda p: [task() for task in [p.app.task(name=p.key)(code) for code in (one, two)]],
)
better(
    "A misspelled option of `@app.task` is ignored.",
    (1, "TypeError"),
    "bulltask raises an error that suggests the right name",
    lambda p: p.app.task(max_retrys=5, name=p.key)(one)(),
)
better(
    "A misspelled option of `apply_async` is ignored.",
    (3, "TypeError"),
    "bulltask raises an error that lists the options",
    lambda p: p.get(p.add.apply_async((1, 2), countdwon=0)),
)
same("`task.run(…)` calls the function.", 3, lambda p: p.add.run(1, 2))


def with_base(p: Any) -> Any:
    """Define a task with a class."""

    class Base(p.Task):  # type: ignore[misc]
        default = 5
        max_retries = 7

        def __call__(self, *args: Any) -> Any:
            return [self.run(*args), self.max_retries]

    def add_default(self: Any, x: int) -> Any:  # not a lambda, whose name Celery cannot compile
        return self.default + x

    return p.app.task(base=Base, bind=True, name=p.key)(add_default)


same(
    "A task with `base=` has the attributes of its class, and an overridden `__call__`.",
    [6, 7],
    lambda p: with_base(p)(1),
)


@same("`register_task` registers a class with a method `run`.", 4)
def _(p: Any) -> object:
    kind = type("Doubling", (p.Task,), {"name": p.key, "run": lambda self, x: 2 * x})
    return p.app.register_task(kind())(2)


same("`task.apply(…)` runs the task in this process and returns a result.", 3, lambda p: p.get(p.add.apply((1, 2))))
same("`task.apply(…)` of a task that fails returns a failed result.", True, lambda p: p.boom.apply().failed())


def defined_with(**options: Any) -> Any:
    """Return code that defines a task with options and calls its function."""
    return lambda p: p.app.task(name=p.key, **options)(one)()


def started(p: Any) -> object:
    result = p.tracked.delay(p.key)
    p.notes()
    status = str(result.status)
    p.open_gate()
    p.get(result)
    return status


def one_an_hour(p: Any) -> int:
    """Define a task with a limit given as text, and call its function."""
    result: int = p.app.task(name=f"{p.key}-text", rate_limit="1/h")(one)()
    return result


def are_spread(p: Any) -> bool:
    """Return whether six jobs of a task with five starts per second take at least 0.9 s."""
    times = [p.get(sent) for sent in [p.limited.delay() for _ in range(6)]]
    return bool(max(times) - min(times) >= 0.9)


ACCEPTED: tuple[tuple[str, Any], ...] = (
    ("`throws` lists expected errors.", (KeyError,)),
    ("`serializer` may be JSON.", "json"),
)
for sentence, value in ACCEPTED:
    same(sentence, 1, defined_with(**{sentence.strip("`").partition("`")[0].partition("=")[0]: value}))
same(
    "With `acks_late=True` and `reject_on_worker_lost=True`, a task runs again if its process dies.",
    "survived",
    lambda p: p.get(p.dies_once_acknowledged_late.delay(p.key)),
)
same("With `track_started=True`, `result.status` of a running task is `STARTED`.", "STARTED", lambda p: started(p))
same("With `ignore_result=True`, `get` returns `None`.", None, lambda p: p.get(p.ignored.delay(3)))
same(
    "`retry_kwargs` sets `max_retries` and `countdown` for `autoretry_for`.",
    4,
    lambda p: p.fails(p.autoretries_with_kwargs.delay(p.key)) and len(p.notes_so_far()),
)
same("`rate_limit` may be a number or a string.", 2, lambda p: defined_with(rate_limit=5)(p) + one_an_hour(p))
same("`task.rate_limit` is the value of the option.", "5/s", lambda p: p.limited.rate_limit)
same("`rate_limit` spreads the starts of a task evenly.", True, lambda p: are_spread(p))
differs(
    "`rate_limit` is checked when a worker starts.",
    (1, "ConfigError"),
    "bulltask checks it earlier, when the task is defined",
    defined_with(rate_limit="often"),
)

# ---- arguments -------------------------------------------------------------------------------------------------------

same("`delay` sends a call, and `get` returns the task's return value.", 5, lambda p: p.get(p.add.delay(2, 3)))
same("`delay` takes keyword arguments.", 5, lambda p: p.get(p.add.delay(x=2, y=3)))
same("`apply_async(args)` sends a call.", 5, lambda p: p.get(p.add.apply_async((2, 3))))
same("`apply_async(args, kwargs)` takes both.", 5, lambda p: p.get(p.add.apply_async((2,), {"y": 3})))
same(
    "`apply_async(kwargs=…)` takes keyword arguments.",
    5,
    lambda p: p.get(p.add.apply_async(kwargs={"x": 2, "y": 3})),
)
same("Omitted arguments have the defaults of their parameters.", "hello Ada!", lambda p: p.get(p.greet.delay("Ada")))
same("Parameters can be keyword-only.", "hi Ada?", lambda p: p.get(p.greet.delay("Ada", "hi", mark="?")))
same("`*args` are passed to the task.", [1, 2, 3], lambda p: p.get(p.collect.delay(1, 2, 3)))
same("`**kwargs` are passed to the task.", [[1], {"a": 2}], lambda p: p.get(p.collect.delay(1, a=2)))
same("A missing argument raises `TypeError` in the sender.", "TypeError", lambda p: p.add.delay(1))
same("An extra argument raises `TypeError` in the sender.", "TypeError", lambda p: p.add.delay(1, 2, 3))
same("An unknown keyword raises `TypeError` in the sender.", "TypeError", lambda p: p.add.delay(1, z=2))
same("A task can return `None`.", None, lambda p: p.get(p.nothing.delay()))
same("A task receives a string as it was sent.", "ünï ☃ \0", lambda p: p.get(p.plain.delay("ünï ☃ \0")))
same(
    "A task receives lists, dictionaries and numbers as they were sent.",
    {"a": [1, 2.5, None, True]},
    lambda p: p.get(p.plain.delay({"a": [1, 2.5, None, True]})),
)
same("A task receives a tuple as a list.", "list", lambda p: p.get(p.kind.delay((1, 2))))
same(
    "An object that JSON cannot represent raises `EncodeError` in the sender.",
    "EncodeError",
    lambda p: p.plain.delay(object()),
)
same(
    "A task receives a `datetime` as a `datetime` if that is the parameter's type hint.",
    ["datetime", "UUID", "Decimal", "bytes"],
    lambda p: typed(p),
)
differs(
    "A task receives a `datetime` as a `datetime`, even without a type hint.",
    ("datetime", "EncodeError"),
    "the JSON contains no types; add a type hint, or set `convert_untyped` to send it as a string",
    lambda p: p.get(p.kind.delay(datetime(2026, 1, 1, tzinfo=UTC))),
)
better(
    "A dictionary key that is a number becomes a string.",
    ({"1": 2}, "EncodeError"),
    "bulltask raises an error; otherwise, the task could not find the number",
    lambda p: p.get(p.plain.delay({1: 2})),
)
same("A set raises `EncodeError` in the sender.", "EncodeError", lambda p: p.plain.delay({1}))
better(
    "NaN is sent as `NaN`, which is not JSON.",
    ("float", "EncodeError"),
    "bulltask raises an error in the sender; a Node.js worker could not read the job",
    lambda p: p.get(p.kind.delay(math.nan)),
)
better(
    "Integers of any size are sent.",
    (2**60, "EncodeError"),
    "from 2^53, bulltask raises an error in the sender; a Node.js worker would round them",
    lambda p: p.get(p.plain.delay(2**60)),
)
differs(
    "A return value that JSON cannot represent fails the task with `EncodeError`.",
    ("EncodeError", "TaskError"),
    "`get` raises `TaskError`, whose message describes the value: a failed BullMQ job stores only text",
    lambda p: p.get(p.returns_object.delay()),
)


def typed(p: Any) -> object:
    return p.get(p.typed.delay(datetime(2026, 1, 1, tzinfo=UTC), UUID(int=7), Decimal("1.5"), b"raw"))


# ---- serializers -----------------------------------------------------------------------------------------------------


def with_settings(**settings: Any) -> Any:
    """Return code that creates an app with settings, and returns 1."""
    return lambda p: type(p.app)("other", set_as_current=False).conf.update(**settings) or 1


same("`serializer` of a call may be JSON.", 5, lambda p: p.get(p.add.apply_async((2, 3), serializer="json")))
same("`accept_content` may contain MIME types.", 1, with_settings(accept_content=["application/json"]))
same(
    '`compression="zlib"` compresses the arguments of a call.',
    10_000,
    lambda p: len(p.get(p.plain.apply_async(("x" * 10_000,), compression="zlib"))),
)
better(
    'A call with `serializer="pickle"` is sent although workers refuse it by default, and its task never runs.',
    ("TimeoutError", "ConfigError"),
    "the call raises an error; for Python objects, use [cloudpickle](../how-to/serializers.md)",
    lambda p: p.plain.apply_async((1,), serializer="pickle").get(timeout=1),
)
better(
    'With `accept_content=["json", "pickle"]`, a worker loads a pickle from anyone who can write to the broker.',
    (1, "ConfigError"),
    "a worker loads only pickles that are signed, with the serializer `cloudpickle`",
    with_settings(accept_content=["json", "pickle"]),
)
differs(
    "`task_serializer` and `result_serializer` may be `msgpack` or `yaml`.",
    (1, "ConfigError"),
    "only `json`, which BullMQ's clients read, and `cloudpickle` are supported",
    with_settings(task_serializer="msgpack", result_serializer="yaml"),
)
better(
    "An unknown `serializer` of a task raises an error when the task is called.",
    (1, "ConfigError"),
    "the error is raised earlier, when the task is defined",
    defined_with(serializer="unknown"),
)
differs(
    "An unknown `serializer` of a call raises `SerializerNotInstalled`.",
    ("SerializerNotInstalled", "ConfigError"),
    "bulltask raises `ConfigError` for all invalid values of options",
    lambda p: p.add.apply_async((2, 3), serializer="unknown"),
)
better(
    "An unknown `compression` of a call raises `OperationalError`, like an unreachable broker.",
    ("OperationalError", "ConfigError"),
    "the error, `ConfigError`, names the option",
    lambda p: p.add.apply_async((2, 3), compression="unknown"),
)
same(
    'A call may have `compression="gzip"`, which is zlib.',
    5,
    lambda p: p.get(p.add.apply_async((2, 3), compression="gzip")),
)
differs(
    "A call may have `retry`, `retry_policy`, `shadow`, `add_to_parent`, `argsrepr` and `delivery_mode`.",
    (5, "UserWarning"),
    "they are accepted without effect, and a warning says why",
    lambda p: p.get(p.add.apply_async((2, 3), **OPTIONS_OF_MESSAGES)),
)

# ---- calls by name ---------------------------------------------------------------------------------------------------

same("`send_task` sends a call by the task's name.", 5, lambda p: p.get(p.app.send_task(p.add.name, (2, 3))))
same("`send_task` takes keyword arguments.", 5, lambda p: p.get(p.app.send_task(p.add.name, kwargs={"x": 2, "y": 3})))
same("`app.signature` describes a call by the task's name.", 5, lambda p: p.get(p.app.signature(p.add.name, (2, 3))))
same("`send_task` takes the name of any task.", True, lambda p: bool(p.app.send_task("elsewhere", (1,)).id))
differs(
    "`send_task` takes positional and keyword arguments of any task.",
    (True, "TypeError"),
    "a call is stored as one JSON object or array; use keyword arguments",
    lambda p: bool(p.app.send_task("elsewhere", (1,), {"y": 2}).id),
)

# ---- options of calls ------------------------------------------------------------------------------------------------


@same("`countdown` delays the start.", True)
def _(p: Any) -> object:
    before = time.time()
    p.get(p.note.apply_async(("late", p.key), countdown=0.5))
    return time.time() - before >= 0.49  # a delay has whole milliseconds, and the server's time is an estimate


@same("`eta` delays the start until a time.", True)
def _(p: Any) -> object:
    eta = datetime.now(UTC) + timedelta(seconds=1)
    p.get(p.note.apply_async(("late", p.key), eta=eta))
    return datetime.now(UTC) >= eta - timedelta(milliseconds=10)


@same("An `eta` without a time zone is UTC.", True)
def _(p: Any) -> object:
    eta = datetime.now(UTC) + timedelta(seconds=1)
    p.get(p.note.apply_async(("late", p.key), eta=eta.replace(tzinfo=None)))
    return datetime.now(UTC) >= eta


same(
    "A task whose `eta` is in the past runs immediately.",
    5,
    lambda p: p.get(p.add.apply_async((2, 3), eta=datetime(2020, 1, 1, tzinfo=UTC))),
)
same("A task that starts before `expires` runs.", 5, lambda p: p.get(p.add.apply_async((2, 3), expires=60)))
same(
    "`expires` takes a `datetime`.",
    5,
    lambda p: p.get(p.add.apply_async((2, 3), expires=datetime.now(UTC) + timedelta(minutes=1))),
)
better(
    "`get` of a task that expired raises `TaskRevokedError`.",
    ("TaskRevokedError", "JobExpiredError"),
    "it raises `JobExpiredError`, a subclass, whose message says when the job expired",
    lambda p: p.get(p.add.apply_async((2, 3), countdown=1, expires=0.5)),
)


@same("The status of a task that expired is `REVOKED`, and it has not failed.", ["REVOKED", True, False])
def _(p: Any) -> object:
    result = p.add.apply_async((2, 3), countdown=1, expires=0.5)
    p.fails(result)
    return [result.status, result.ready(), result.failed()]


@same("A task that expired does not run.", [])
def _(p: Any) -> object:
    p.fails(p.note.apply_async(("ran", p.key), countdown=1, expires=0.5))
    return p.notes_so_far()


same("`priority` is accepted.", 5, lambda p: p.get(p.add.apply_async((2, 3), priority=3)))


@same("With Redis, the lowest `priority` number runs first.", "[9]")
def _(p: Any) -> object:
    p.hold.apply_async((p.key,), queue="single")
    p.notes()
    later = [p.note.apply_async((number, p.key), queue="single", priority=number) for number in (9, 9, 3)]
    p.open_gate()
    for result in later:
        p.get(result)
    return p.notes(4)[-1]  # a worker of Celery has fetched one before


@same("`queue` selects the queue.", ["[1]", "[2]"])
def _(p: Any) -> object:
    p.hold.apply_async((p.key,), queue="single")
    p.notes()
    waiting = p.note.apply_async((2, p.key), queue="single")
    p.get(p.note.delay(1, p.key))
    first = p.notes()
    p.open_gate()
    p.get(waiting)
    return first + p.notes(2)[1:]


same(
    "`task_id` sets the id.",
    True,
    lambda p: p.add.apply_async((2, 3), task_id=p.key).id == p.key,
)


@better(
    "A task that is sent twice with the same id runs twice.",
    (["[1]", "[2]"], ["[1]"]),
    "the second send adds nothing, so repeating a send is safe",
)
def _(p: Any) -> object:
    option = {"task_id" if p.is_celery else "job_id": p.key}
    results = [p.note.apply_async((number, p.key), **option) for number in (1, 2)]
    p.get(results[0])
    p.get(p.note.delay(3, p.again().key))
    p.wait_for(lambda: len(p.notes_so_far()) == (2 if p.is_celery else 1))
    return sorted(p.notes_so_far())


# ---- the request -----------------------------------------------------------------------------------------------------


def requested(*names: str, **options: Any) -> Any:
    """Return code that returns attributes of the request."""
    return lambda p: p.get(p.request.apply_async((names,), **options))


@same("`self.request.id` is the id of the result.", True)
def _(p: Any) -> object:
    result = p.request.delay(["id"])
    return p.get(result) == [result.id]


same("`self.request.task` is the task's name.", True, lambda p: p.get(p.request.delay(["task"])) == [p.request.name])
same("`self.request.retries` is 0 at first.", [0], requested("retries"))
same("`self.request.called_directly` is false in a worker.", [False], requested("called_directly"))
same("`headers` are in `self.request.headers`.", [{"trace": "7"}], requested("headers", headers={"trace": "7"}))
differs(
    "`self.request.args` and `.kwargs` are those of the call.",
    ([[["args", "kwargs"]], {}], [[], {"names": ["args", "kwargs"]}]),
    "positional arguments are in `kwargs`, by the names of their parameters, as they are stored",
    requested("args", "kwargs"),
)


@same(
    "In a task that another task has sent, `self.request.root_id` and `.parent_id` are the id of the other task.",
    True,
)
def _(p: Any) -> object:
    result = p.sends_a_request.delay(p.key)
    p.get(result)
    return p.notes() == [str([[result.id, result.id]])]


@same("In a chain, `root_id` is the id of the first step, and `parent_id` that of the step before.", True)
def _(p: Any) -> object:
    names = ["id", "root_id", "parent_id"]
    last = p.chain(*[p.request.si(names) for _ in range(3)]).delay()
    third, second, first = p.get(last), p.get(last.parent), p.get(last.parent.parent)
    return [first[1:], second[1:], third[1:]] == [[first[0], None], [first[0]] * 2, [first[0], second[0]]]


same(
    "`self.request.delivery_info` has the queue, as `routing_key`.",
    "single",
    lambda p: requested("delivery_info", queue="single")(p)[0]["routing_key"],
)
same(
    "`self.request.hostname` is the worker's name, and different for each worker.",
    True,
    lambda p: requested("hostname")(p) != requested("hostname", queue="single")(p),
)
same(
    "`self.request.timelimit` is the call's `time_limit` and `soft_time_limit`.",
    [[60, 30]],
    requested("timelimit", time_limit=60, soft_time_limit=30),
)

same(
    "`self.request.eta` and `.expires` are times in ISO 8601, or `None`.",
    [None, "2090-01-01T00:00:00+00:00"],
    requested("eta", "expires", expires=datetime(2090, 1, 1, tzinfo=UTC)),
)
same("`self.request.is_eager` is false in a worker.", [False], requested("is_eager"))
same("In `task.apply(…)`, `self.request.is_eager` is true.", [True], lambda p: p.get(p.request.apply((["is_eager"],))))
same(
    "In the members of a group, `self.request.group` is the id of the group.",
    True,
    lambda p: (lambda result: p.get(result) == [[result.id]] * 2)(p.group([p.request.si(["group"])] * 2).delay()),
)

# ---- in a worker -----------------------------------------------------------------------------------------------------


@same("A task can send other tasks.", "['from a task']")
def _(p: Any) -> object:
    p.get(p.calls_another.delay(p.key))
    return p.notes()[0]


better(
    "A task that waits for another task's result raises an error.",
    ("RuntimeError", 3),
    "the task waits, and the worker logs a warning, because such tasks can block it",
    lambda p: p.get(p.waits_for_another.delay(p.key)),
)
same(
    "A task that passes `get(disable_sync_subtasks=False)` waits for another task's result.",
    3,
    lambda p: p.get(p.waits_and_says_so.delay(p.key)),
)
same(
    "A task may wait for another task's result in `with allow_join_result()`.",
    3,
    lambda p: p.get(p.waits_where_it_is_allowed.delay(p.key)),
)
better(
    "A task whose process is killed fails with `WorkerLostError`.",
    ("WorkerLostError", "survived"),
    "no work is lost: the task runs again in another process",
    lambda p: p.get(p.dies_once.delay(p.key)),
)
better(
    "`sys.exit()` in a task ends its process; the task fails with `WorkerLostError`.",
    ("WorkerLostError", "TaskError"),
    "only the task fails, with `SystemExit: 3`",
    lambda p: p.get(p.exits.delay()),
)
same(
    "A task can catch `SoftTimeLimitExceeded`, clean up, and return a value.",
    "SoftTimeLimitExceeded",
    lambda p: p.get(p.cleans_up_at_the_soft_limit.delay(p.key)),
)
better(
    "`except Exception` in a task catches `SoftTimeLimitExceeded`.",
    ("swallowed", "TaskError"),
    "it is a `BaseException`, so a handler for ordinary errors does not swallow it",
    lambda p: p.get(p.swallows_the_soft_limit.delay(p.key)),
)
same(
    "A task without retries that exceeds `time_limit` fails with `TimeLimitExceeded`.",
    "TimeLimitExceeded",
    lambda p: p.get(p.exceeds_the_hard_limit.delay(p.key)),
)
same(
    "`apply_async(time_limit=…)` limits one call.",
    "TimeLimitExceeded",
    lambda p: p.get(p.hold.apply_async((p.key,), time_limit=1)),
)

# ---- periodic tasks --------------------------------------------------------------------------------------------------

same(
    "`app.add_periodic_task(schedule, task.s(…), name=…)` adds an entry to the schedule, and returns its name.",
    True,
    lambda p: p.app.add_periodic_task(3600.0, p.add.s(1, 2), name=p.key) == p.key,
)
same(
    "Receivers of `on_after_configure` and `on_after_finalize` are called once, before the schedule is used.",
    ["after_configure", "after_finalize"],
    lambda p: sent_signals(p),
)
better(
    "If a receiver of `on_after_configure` raises an error, the schedule lacks the tasks that it would have added.",
    ("started", "ZeroDivisionError"),
    "the worker does not start",
    lambda p: sent_signals(p, lambda: 1 / 0) and "started",
)


def sent_signals(p: Any, action: Any = lambda: None) -> list[str]:
    app, sent = type(p.app)(p.key, set_as_current=False), list[str]()

    def configured(sender: Any, **kwargs: Any) -> None:
        sent.append("after_configure")
        action()

    def finalized(sender: Any, **kwargs: Any) -> None:
        sent.append("after_finalize")

    app.on_after_configure.connect(configured)
    app.on_after_finalize.connect(finalized)
    for _ in range(2):
        if p.is_celery:
            app.conf.beat_schedule  # noqa: B018 - reads the configuration
            app.finalize()
        else:
            app._load_tasks()
    return sent
