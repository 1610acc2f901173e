"""How functions become an app's tasks, and how an app and its tasks are found.

:class:`Tasks` is ``app.tasks``. :func:`decorate` is behind ``@app.task`` and ``@shared_task``. Then come JSON Schema of
all tasks (``bulltask tasks``, the TypeScript client), and :func:`find_app`, which ``-A`` names.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from bulltask.config.config import Config, check_serializer
from bulltask.config.parsers import Annotations
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import (
    AppNotFoundError,
    BulltaskError,
    ConfigError,
    DuplicateTaskError,
    TaskNotRegisteredError,
    did_you_mean,
)
from bulltask.jobs.names import FAN_OUT, STARMAP, bullmq_name
from bulltask.registry.batches import BatchJob
from bulltask.registry.call import JobPlan, plan_job
from bulltask.registry.context import Context
from bulltask.registry.options import BatchTaskKeywords, CallOptions, TaskKeywords, TaskOptions
from bulltask.registry.protocols import Sender
from bulltask.registry.request import current_sender, current_task_class, task_name
from bulltask.registry.task import OPTIONS, AnyTask, AsyncTask, Task, attributes_of_class, options_of_class
from bulltask.registry.types import Definitions, Schema, renamed

__all__ = [
    "SHARED",
    "BatchTaskDecorator",
    "BoundTaskDecorator",
    "ClassTaskDecorator",
    "TaskDecorator",
    "Tasks",
    "add_to_import_path",
    "annotate",
    "builtin_tasks",
    "decorate",
    "find_app",
    "import_related",
    "plan_of",
    "register_instance",
    "schema_of",
    "shared_task",
    "use_class",
]


def annotate(task: AnyTask[Any, Any], annotations: Annotations) -> None:
    """Override the task's options by those in ``annotations``; raises ``ConfigError`` if they are invalid."""
    for where, given in _found(task, annotations):
        try:
            task._set_options(_changed(task._options, given))
        except (BulltaskError, TypeError, ValueError) as exc:
            raise ConfigError(f"task_annotations[{where!r:.200}] for task {task.name}: {exc}") from exc


def _changed(options: TaskOptions, given: Mapping[str, Any]) -> TaskOptions:
    merged = {**{field.name: getattr(options, field.name) for field in fields(options)}, **given}
    if "max_retries" in given:
        merged["unlimited_retries"] = given["max_retries"] is None
    return TaskOptions.of(merged)


def _found(task: AnyTask[Any, Any], annotations: Annotations) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Return the options for all tasks (``*``), then those for this task, which take precedence."""
    for part in annotations:
        if isinstance(part, Mapping):
            found = {"*": part.get("*"), task.name: part.get(task.name)}
        else:
            found = {"*": getattr(part, "annotate_any", lambda: None)(), task.name: part.annotate(task)}
        yield from ((where, options) for where, options in found.items() if options)


class Tasks(Mapping[str, AnyTask[Any, Any]]):
    """An app's tasks by name; and those of bulltask's own jobs, ``builtin``, which are found by name, but not listed.

    ``shared`` are the tasks of ``shared_task``, which every app includes.
    """

    def __init__(
        self,
        shared: Mapping[str, AnyTask[Any, Any]] | None = None,
        builtin: Mapping[str, AnyTask[Any, Any]] | None = None,
    ) -> None:
        self._tasks: dict[str, AnyTask[Any, Any]] = {}
        self._shared = {} if shared is None else shared
        self._builtin = {} if builtin is None else builtin
        self._annotations: Annotations = ()
        self._queues: dict[str, None] = {}
        self._has_handlers = False

    def add(self, task: AnyTask[Any, Any]) -> None:
        """Register a task.

        A function that is defined again replaces its earlier definition. This happens after ``importlib.reload``, when
        a notebook cell runs twice, or when a file is imported under two names.

        Raises:
            DuplicateTaskError: Another function already has the name; the message shows both locations.
        """
        other = self.get(task.name)
        if other is not None and not _is_same_function(other, task):
            raise DuplicateTaskError(
                f"two tasks are named {task.name!r:.200}: {other._location} and {task._location}; "
                "give one of them another name with @app.task(name='…')"
            )
        annotate(task, self._annotations)
        self._tasks[task.name] = task
        self._has_handlers |= task._has_handlers

    def refresh(self, changed: Iterable[AnyTask[Any, Any]]) -> None:
        """Apply ``task_annotations`` again to tasks that have another class now."""
        for task in changed:
            annotate(task, self._annotations)
            self._has_handlers |= task._has_handlers

    def add_queues(self, names: Iterable[str]) -> None:
        """Let workers process these queues, even if no task has one of them as its option ``queue``."""
        self._queues.update(dict.fromkeys(names))

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues of the tasks, apart from the default queue, and those of :meth:`add_queues`."""
        more = self._shared.queues if isinstance(self._shared, Tasks) else ()
        queues = (task._options.queue for task in self.values() if task._options.queue)
        return tuple(dict.fromkeys([*queues, *self._queues, *more]))

    def configure(self, config: Config) -> None:
        """Apply ``task_annotations`` to all tasks, also later ones, and check serializers; errors name the task."""
        annotations = config.annotations or ()
        for task in self.values():
            annotate(task, annotations)
            check_serializer(task._options.serializer, config, f"the serializer of task {task.name} is cloudpickle")
        self._annotations = annotations

    @property
    def have_handlers(self) -> bool:
        """Whether any task has handlers, such as ``on_success``."""
        return self._has_handlers or (isinstance(self._shared, Tasks) and self._shared.have_handlers)

    def __getitem__(self, name: str) -> AnyTask[Any, Any]:
        task = self._tasks.get(name) or self._shared.get(name)
        if task is None:
            raise TaskNotRegisteredError(f"task {name!r:.200} is not registered{did_you_mean(name, self)}")
        return task

    def get(self, name: str, default: Any = None) -> AnyTask[Any, Any] | Any:
        """Return the task, or ``default``; builds no error message, because it is on the worker's hot path."""
        return self._tasks.get(name) or self._shared.get(name) or self._builtin.get(name) or default

    def __contains__(self, name: object) -> bool:
        return name in self._tasks or name in self._shared

    def __iter__(self) -> Iterator[str]:
        yield from self._tasks
        yield from (name for name in self._shared if name not in self._tasks)

    def __len__(self) -> int:
        return len(set(self._tasks) | set(self._shared))


def _is_same_function(first: AnyTask[Any, Any], second: AnyTask[Any, Any]) -> bool:
    """Compare by location, or by module and name: an edit moves a function, and a file may be imported twice."""
    if first._location == second._location:
        return True
    module, name = first.function.__module__, first.function.__qualname__
    return "<lambda>" not in name and (module, name) == (second.function.__module__, second.function.__qualname__)


SHARED = Tasks()
"""All of this process's shared tasks; every app's registry includes them."""


def builtin_tasks(sender: Callable[[], Sender], find: Callable[[str], AnyTask[Any, Any]]) -> dict[str, Task[..., Any]]:
    """Return the tasks that every app has, by name: for jobs of a canvas that call none of the user's functions."""

    def fan_out(dependents: Sequence[str], result: Any = None) -> Any:  # noqa: ARG001 - the worker reads them
        return result

    def starmap(task: str, items: Iterable[Any]) -> list[Any]:
        called = find(task)
        pickles = called._options.result_form(sender()._config).is_pickled
        # All arguments are read first: if this worker cannot read one, another worker may make all the calls.
        bound = [called._codec.decode(item) for item in items]
        return [_call(called, *arguments, pickles=pickles) for arguments in bound]

    functions: dict[str, Callable[..., Any]] = {FAN_OUT: fan_out, STARMAP: starmap}
    options = TaskOptions(rate_limit=0)  # task_default_rate_limit is for the user's tasks
    return {name: Task(function, name, options, sender, bind=False) for name, function in functions.items()}


def _call(task: AnyTask[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, pickles: bool) -> Any:
    result = task._direct(args, kwargs)
    if task._is_async:
        result = asyncio.run(result)
    conversion = task._codec.conversion
    return result if conversion is None or pickles else conversion.encode_result(result)


P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B_co = TypeVar("B_co", bound=AnyTask[..., Any], covariant=True)

# An ``async def`` is a function as well, so each pair of overloads below overlaps; the first match wins.
_AsyncFunction = Callable[P, Coroutine[Any, Any, R]]


class TaskDecorator(Protocol):
    """Return type of ``@app.task(…)`` with options: turns a function into a ``Task`` or an ``AsyncTask``."""

    @overload
    def __call__(self, function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class BatchTaskDecorator(Protocol):
    """Return type of ``@app.task(batch=100, …)``: the function receives a list of jobs, and a call has one argument.

    A type checker also chooses it for ``@app.task(**options)``, so it accepts any other function, too.
    """

    @overload
    def __call__(self, function: _AsyncFunction[[list[BatchJob[A]]], None], /) -> AsyncTask[[A], None]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: _AsyncFunction[[list[BatchJob[A]]], Sequence[R] | None], /) -> AsyncTask[[A], R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[[list[BatchJob[A]]], None], /) -> Task[[A], None]: ...
    @overload
    def __call__(self, function: Callable[[list[BatchJob[A]]], Sequence[R] | None], /) -> Task[[A], R]: ...
    @overload
    def __call__(self, function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class BoundTaskDecorator(Protocol):
    """Return type of ``@app.task(bind=True, …)``: the function's first parameter is the :class:`Context`."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...


class ClassTaskDecorator(Protocol[B_co]):
    """Return type of ``@app.task(bind=True, base=…)``: the function's first parameter is the task itself."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[B_co, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[B_co, P], R], /) -> Task[P, R]: ...


@overload
def shared_task(function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
@overload
def shared_task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def shared_task(
    *,
    base: type[AnyTask[..., Any]] | None = None,
    name: str | None = None,
    **options: Unpack[BatchTaskKeywords],
) -> BatchTaskDecorator: ...
@overload
def shared_task(
    *, bind: Literal[True], base: type[B_co], name: str | None = None, **options: Unpack[TaskKeywords]
) -> ClassTaskDecorator[B_co]: ...
@overload
def shared_task(
    *, bind: Literal[True], name: str | None = None, **options: Unpack[TaskKeywords]
) -> BoundTaskDecorator: ...
@overload
def shared_task(
    *,
    bind: Literal[False] = False,
    base: type[AnyTask[..., Any]] | None = None,
    name: str | None = None,
    **options: Unpack[TaskKeywords],
) -> TaskDecorator: ...


def shared_task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    bind: bool = False,
    base: type[AnyTask[..., Any]] | None = None,
    name: str | None = None,
    **options: Any,
) -> Any:
    """Turn a function into a task of every app, for libraries that have no app; options as in :meth:`App.task`.

    Without ``base``, it has the class ``app.Task`` of the current app.
    """
    kind = base or current_task_class()
    return decorate(
        function, current_sender, SHARED.add, bind=bind, name=name, options=options, base=kind, is_default=base is None
    )


def decorate(  # noqa: PLR0913 - those of the decorators
    function: Callable[..., Any] | None,
    sender: Callable[[], Any],
    add: Callable[[AnyTask[Any, Any]], None],
    *,
    bind: bool,
    name: str | None,
    options: Mapping[str, Any],
    base: type[AnyTask[Any, Any]] | None = None,
    is_default: bool = False,
) -> Any:
    """Turn a function into a task, or return the decorator that does so if there is no function yet.

    ``sender`` returns the app that sends the task's calls, ``add`` registers the task, and ``is_default`` means that
    ``base`` is that of the app, and may change: :func:`use_class`. The other arguments are those of :meth:`App.task`.
    """
    kind = Task if base is None else base
    _options_of(kind, options)  # errors are raised before there is a function

    def turn_into_task(target: Callable[..., Any]) -> AnyTask[Any, Any]:
        definition = _Definition(target, name or task_name(target), options, sender, bind)
        task = definition.task(kind)
        if is_default:
            vars(task)["_definition"] = kind, definition
        add(task)
        return task

    return turn_into_task if function is None else turn_into_task(function)


@value_class
class _Definition:
    """What a decorator was given, except for the class."""

    function: Callable[..., Any]
    name: str
    options: Mapping[str, Any]
    sender: Callable[[], Any]
    bind: bool

    def task(self, kind: type[AnyTask[Any, Any]]) -> AnyTask[Any, Any]:
        """Return a task that is an instance of a class."""
        task_options, attributes = _options_of(kind, self.options)
        task = _new_task(kind, self.function, self.name, task_options, self.sender, bind=self.bind)
        vars(task).update(attributes)
        return task


def use_class(tasks: Iterable[AnyTask[Any, Any]], kind: type[AnyTask[Any, Any]]) -> list[AnyTask[Any, Any]]:
    """Change the class of those tasks that have no ``base``, because their app has another one; return these tasks."""
    changed = []
    for task in tasks:
        present, definition = vars(task).get("_definition", (kind, None))
        if present is not kind:
            new = definition.task(kind)
            object.__setattr__(task, "__class__", type(new))
            vars(task).clear()
            vars(task).update({**vars(new), "_definition": (kind, definition)})
            task._prepare()  # because an attribute may refer to the task
            changed.append(task)
    return changed


def _options_of(kind: type[AnyTask[Any, Any]], given: Mapping[str, Any]) -> tuple[TaskOptions, dict[str, Any]]:
    """Return the options of a task, and the attributes that the decorator sets because the task's class has them."""
    if kind in (Task, AsyncTask):
        return TaskOptions.of(given), {}
    inherited, declared = options_of_class(kind), attributes_of_class(kind)
    options = {name: value for name, value in given.items() if name in OPTIONS or name not in declared}
    own = {name: value for name, value in given.items() if name in inherited or name not in options}
    return TaskOptions.of({**inherited, **options}), own


def _new_task(
    kind: type[AnyTask[Any, Any]],
    function: Callable[..., Any],
    name: str,
    options: TaskOptions,
    sender: Callable[[], Any],
    *,
    bind: bool,
) -> AnyTask[Any, Any]:
    """Return a task that is an instance of ``kind``: of ``Task``, or of a user's class."""
    if not (isinstance(kind, type) and issubclass(kind, AnyTask)):
        raise ConfigError(f"the base of task {name!r} must be a subclass of bulltask.Task, not {kind!r}")
    has_base = kind not in (Task, AsyncTask)
    if inspect.iscoroutinefunction(function) and not issubclass(kind, AsyncTask):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        kind = type(kind.__name__, (kind, AsyncTask), names) if has_base else AsyncTask
    task = kind.__new__(kind)
    AnyTask.__init__(task, function, name, options, sender, bind=bind, has_base=has_base)
    if has_base:
        task.__init__()  # type: ignore[misc] # that of the user's class
    return task


def register_instance(task: AnyTask[Any, Any], sender: Callable[[], Any]) -> None:
    """Turn an instance of a user's class into a task; raises ``ConfigError`` if the class has no suitable ``run``."""
    kind = type(task)
    if not isinstance(task, AnyTask) or kind.run is AnyTask.run:
        raise ConfigError(f"register_task needs a subclass of bulltask.Task with a method run, not {kind.__qualname__}")
    name = vars(task).get("name") or getattr(kind, "name", None) or task_name(kind)
    options = TaskOptions.of(options_of_class(kind))
    AnyTask.__init__(task, kind.run, name, options, sender, bind=True, has_base=True)


_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def schema_of(tasks: Iterable[AnyTask[..., Any]], config: Config) -> Schema:
    """Return a document with the JSON Schema of each task, derived from its type hints.

    ``tasks`` has, for each name, the ``description``, BullMQ's name of the ``queue``, and the schemas of the job's
    ``data`` and ``returnvalue``; ``$defs`` are the types to which these schemas refer. A parameter without a hint may
    be anything.
    """
    tasks = sorted(tasks, key=lambda task: task.name)
    data, results = Definitions(), Definitions(of_results=True)
    entries = {task.name: _entry(task, config, data) for task in tasks}
    returnvalues = {
        task.name: {"type": "null"}
        if task._options.ignore_result
        else task._codec.types.type_of("return").schema(results)
        for task in tasks
    }
    names = results.rename_other(data.schemas)
    for name, schema in returnvalues.items():
        entries[name]["returnvalue"] = renamed(schema, names)
    definitions = {names.get(name, name): renamed(schema, names) for name, schema in results.schemas.items()}
    return {"$schema": _DIALECT, "tasks": entries, "$defs": dict(sorted({**data.schemas, **definitions}.items()))}


def plan_of(task: AnyTask[..., Any], config: Config) -> JobPlan:
    """Return the plan of calls without options; raises ``ConfigError`` if ``task_routes`` needs the arguments."""
    try:
        return plan_job(task.name, task._options, CallOptions(), config, {})
    except BulltaskError:
        raise
    except Exception as exc:
        raise ConfigError(
            f"a function in task_routes failed for task {task.name!r} without arguments ({type(exc).__name__}: {exc}); "
            "set queue= for the task, or let the function return None"
        ) from exc


def _entry(task: AnyTask[..., Any], config: Config, definitions: Definitions) -> Schema:
    queue = bullmq_name(plan_of(task, config).queue, hash_tag=config.queue_hash_tag)
    description = (inspect.getdoc(task.function) or "").partition("\n\n")[0].replace("\n", " ")
    return {
        **({"description": description} if description else {}),
        "queue": queue,
        "data": task._codec.data_schema(definitions),
    }


ATTRIBUTES: Final = ("app", "bulltask", "celery", "application")
_FACTORY: Final = re.compile(r"(?i)app|celery|bulltask|create|make")
SUBMODULES: Final = ("app", "bulltask", "celery", "tasks", "main", "worker")


def add_to_import_path(directory: str | None = None) -> None:
    """Put ``directory`` (default: the current directory) first on the import path, as for a script in it."""
    path = str(Path(directory or ".").resolve())
    if path not in sys.path:
        sys.path.insert(0, path)


def find_app(spec: str, kind: type[A]) -> A:
    """Return the app of class ``kind`` that ``spec``, the value of ``-A``, names.

    * ``pkg.mod:name``: the object ``name`` in that module; ``pkg.mod:name()`` calls a factory.
    * ``pkg.mod``: the app named ``app``, ``bulltask``, ``celery`` or ``application`` in that module, or its only app.
    * ``pkg``: if a package contains no app, its submodules ``app``, ``bulltask``, ``celery``, ``tasks``, ``main`` and
      ``worker`` are searched.
    * ``pkg.mod.name``: the same as ``pkg.mod:name``, as in Celery.

    Raises:
        AppNotFoundError: No app was found (the message lists what was tried), or more than one. Errors raised by the
            user's modules are not caught.
    """
    tried: list[str] = []
    if ":" in spec:
        module_name, _, name = spec.partition(":")
        app = _load_attribute(module_name, name, kind, tried)
    else:
        app = (
            _find_in_module(spec, kind, tried)
            or _find_in_submodules(spec, kind, tried)
            or _load_dotted(spec, kind, tried)
        )
    if app is None:
        lines = "".join(f"\n  - {line}" for line in tried)
        raise AppNotFoundError(f"no bulltask App found for {spec!r:.200}; tried, from {Path.cwd()}:{lines}")
    return app


def import_related(packages: Iterable[str] | Callable[[], Iterable[str]], related_name: str | None) -> list[str]:
    """Import ``package.related_name`` of each package that has it; return the imported names (Celery's autodiscover).

    A package may be Django's ``shop.apps.ShopConfig``. Without ``related_name``, the packages themselves are imported.
    """
    imported = []
    for package in packages() if callable(packages) else packages:
        module = _import_package(package)
        name = f"{module.__name__}.{related_name}" if related_name else package
        if related_name is None or (hasattr(module, "__path__") and importlib.util.find_spec(name) is not None):
            importlib.import_module(name)
            imported.append(name)
    return imported


def _import_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        module_name, _, attribute = name.rpartition(".")
        if exc.name != name or not module_name:
            raise
        # Django's INSTALLED_APPS may name a class, whose attribute ``name`` is the package.
        package = getattr(getattr(importlib.import_module(module_name), attribute, None), "name", None)
        if not isinstance(package, str):
            raise
    return importlib.import_module(package)


def _load_attribute(module_name: str, name: str, kind: type[A], tried: list[str]) -> A | None:
    module = _import(module_name, tried)
    if module is None:
        return None
    value: Any = module
    called = name.endswith(")")
    for part in name.partition("(")[0].split("."):
        if not hasattr(value, part):
            tried.append(f"{_place_of(module)}: has no {name!r}; it {_describe_apps(module, kind)}")
            return None
        value = getattr(value, part)
    if called or inspect.isfunction(value):
        if needed := _required(value) if name.endswith("()") or not called else "those in the parentheses":
            tried.append(
                f"{module_name}:{name} needs arguments ({needed}), and -A calls a factory without any: write a module "
                f"with a line such as app = {name.partition('(')[0]}(…), and name that module"
            )
            return None
        value = value()
    if not isinstance(value, kind):
        tried.append(f"{module_name}:{name} is {type(value).__name__}, not an App")
        return None
    return value


def _required(factory: Callable[..., object]) -> str:
    """Return the names of a factory's required parameters."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a callable of C code
        return ""
    optional = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return ", ".join(each.name for each in parameters if each.default is each.empty and each.kind not in optional)


def _find_in_module(module_name: str, kind: type[A], tried: list[str]) -> A | None:
    module = _import(module_name, tried)
    if module is None:
        return None
    for name in ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, kind):
            return value
    apps = {id(value): (name, value) for name, value in vars(module).items() if isinstance(value, kind)}
    if len(apps) == 1:
        return next(iter(apps.values()))[1]
    if apps:  # searching further would choose one of these arbitrarily
        names = ", ".join(sorted(name for name, _ in apps.values()))
        raise AppNotFoundError(f"{module_name} has several apps ({names}): choose one with -A {module_name}:NAME")
    tried.append(f"{_place_of(module)}: {_describe_apps(module, kind)}")
    return None


def _find_in_submodules(module_name: str, kind: type[A], tried: list[str]) -> A | None:
    package = sys.modules.get(module_name)
    if package is None or not hasattr(package, "__path__"):
        return None
    for name in SUBMODULES:
        full = f"{module_name}.{name}"
        if importlib.util.find_spec(full) is None:
            tried.append(f"{full}: does not exist")
        elif (app := _find_in_module(full, kind, tried)) is not None:
            return app
    return None


def _load_dotted(spec: str, kind: type[A], tried: list[str]) -> A | None:
    module_name, _, name = spec.rpartition(".")
    if not module_name or spec in sys.modules:
        return None
    return _load_attribute(module_name, name, kind, tried)


def _import(name: str, tried: list[str]) -> ModuleType | None:
    if not all(part.isidentifier() for part in name.split(".")):
        tried.append(f"{name!r:.200}: is not a module name")
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not (name == exc.name or name.startswith(f"{exc.name}.")):
            raise  # the module exists; something that it imports does not
        tried.append(f"{name}: cannot be imported ({exc})")
        return None


def _describe_apps(module: ModuleType, kind: type[Any]) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, kind))
    if names:
        return f"has the apps {', '.join(names)}"
    factories = [
        f"-A {module.__name__}:{name}"
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _FACTORY.search(name)
    ]
    return f"has no App; if this is a factory of one, use {' or '.join(factories)}" if factories else "has no App"


def _place_of(module: ModuleType) -> str:
    """Return the module's name, and its file if it may be another module than the user expects."""
    name, file = module.__name__, getattr(module, "__file__", None)
    here = Path.cwd()
    if file is not None and Path(file).is_relative_to(here):
        return name
    path = here.joinpath(*name.split("."))
    hidden = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)
    if hidden is None:
        return f"{name} ({file or 'built in'})"
    return f"{name} ({file or 'built in'}, which hides {hidden.relative_to(here)}: rename your module)"
