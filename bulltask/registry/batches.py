"""Batch tasks: tasks whose function is called once for several jobs.

The function has one parameter, a list of jobs. A call, ``index.delay(document)``, still sends one job. Its data is
its argument as JSON: an object if the argument is a dataclass, a ``TypedDict``, a model or a dictionary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin

from bulltask.jobs.clock import Duration, to_epoch_ms, to_ms
from bulltask.jobs.errors import ConfigError, InvalidJobError, PermanentError, Retry, incompatible
from bulltask.registry.call import Arguments
from bulltask.registry.options import expiry_ms
from bulltask.registry.request import Request
from bulltask.registry.types import CallTypes, hints_of

__all__ = [
    "PARAMETER",
    "BatchArguments",
    "BatchJob",
    "ErrorOrResult",
    "batch_types",
    "call_for_one",
    "check_batch_function",
    "from_wire",
    "split_outcome",
    "to_wire",
]

A = TypeVar("A")

PARAMETER: Final = "data"
"""The name of a call's only parameter."""

ErrorOrResult = tuple[BaseException | None, object]
"""The outcome of a call for one job: an exception and ``None``, or ``None`` and the job's result."""


class BatchJob(Generic[A]):
    """One of the jobs for which a batch task's function was called: ``def index(jobs: list[BatchJob[Document]])``.

    ``data`` is the argument of the job's call; ``request`` has its id, attempts, headers …

    If you call none of its methods, the function decides the job's outcome. The job's item in the returned list is its
    result. If the function raises an exception, the attempt fails with that exception.
    """

    __slots__ = ("_outcome", "data", "request")

    def __init__(self, data: A, request: Request) -> None:
        self.data = data
        self.request = request
        self._outcome: ErrorOrResult | None = None

    @property
    def id(self) -> str:
        """The job's id."""
        return self.request.id

    @property
    def outcome(self) -> ErrorOrResult | None:
        """The outcome that one of the methods has set for this job; ``None`` if none was called."""
        return self._outcome

    def complete(self, result: object = None) -> None:
        """Complete this job, with this result, even if the function raises an exception later."""
        self._outcome = None, result

    def fail(self, error: BaseException) -> None:
        """End this job as if its task had raised ``error``: it is retried, or fails, by the rules for that exception.

        ``PermanentError`` fails the job without a retry. Raises ``TypeError`` if ``error`` is not an exception.
        """
        if not isinstance(error, BaseException):
            raise TypeError(
                f"fail() takes an exception, not {error!r:.200}; for a message, use PermanentError(message)"
            )
        self._outcome = error, None

    def retry(
        self,
        *,
        countdown: Duration | None = None,
        exc: BaseException | None = None,
        max_retries: int | None = None,
        eta: datetime | None = None,
        expires: Duration | datetime | None = None,
    ) -> None:
        """Retry this job, however the function ends, without raising; arguments as for :meth:`Context.retry`."""
        delay_ms = None if countdown is None else to_ms(countdown, "countdown")
        eta_ms = None if eta is None else to_epoch_ms(eta)
        self._outcome = (
            Retry(delay_ms=delay_ms, exc=exc, max_retries=max_retries, eta_ms=eta_ms, expires=expiry_ms(expires)),
            None,
        )

    def __repr__(self) -> str:
        return f"<BatchJob {self.id or '(called directly)'} of {self.request.task}>"


def split_outcome(
    task: str, jobs: Sequence[BatchJob[Any]], raised: BaseException | None, returned: object
) -> list[ErrorOrResult]:
    """Return the outcome of each job, from that of the call and those that were set for individual jobs."""
    results: Sequence[object] = [None] * len(jobs)
    if raised is None and returned is not None:
        if isinstance(returned, Sequence) and not isinstance(returned, str | bytes) and len(returned) == len(jobs):
            results = returned
        else:
            what = f"{len(returned)} results" if isinstance(returned, list | tuple) else type(returned).__name__
            raised = PermanentError(
                f"batch task {task} returned {what} for {len(jobs)} jobs; return a list with one result for each job, "
                "or None"
            )
    return [job.outcome or (raised, result) for job, result in zip(jobs, results, strict=True)]


def call_for_one(
    function: Callable[..., Any], arguments: Mapping[str, Any], request: Request, *, is_async: bool
) -> Any:
    """Call a batch task's function for one job; return its result or a coroutine, or raise what fails the job."""
    job = BatchJob[Any](arguments[PARAMETER], request)
    if not is_async:
        return _result_of_one(job, function([job]))

    async def call() -> Any:
        return _result_of_one(job, await function([job]))

    return call()


def _result_of_one(job: BatchJob[Any], returned: object) -> Any:
    ((error, result),) = split_outcome(job.request.task, [job], None, returned)
    if error is not None:
        raise error
    return result


def check_batch_function(function: Callable[..., Any], task: str, *, bind: bool, spark: bool) -> None:
    """Raise ``ConfigError`` if a function cannot be called with a list of jobs, or an option is for one job."""
    if bind or spark:
        option, reason = (
            ("bind", "each job has its own request: use job.request")
            if bind
            else ("spark", "its Spark jobs belong to a single job")
        )
        raise ConfigError(f"batch task {task!r:.200} cannot have {option}=True: {reason}")
    try:
        inspect.signature(function).bind([])
    except TypeError as exc:
        raise ConfigError(
            f"the function of batch task {task!r:.200} is called with one argument, the list of jobs: {exc}; write "
            "def function(jobs: list[BatchJob[...]])"
        ) from None


class BatchArguments(Arguments):
    """The signature of one call of a batch task: one argument, or the fields of that argument as keywords."""

    def __init__(self, task: str) -> None:
        super().__init__(_one_call, task, skip_first=False)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the argument as a dictionary with its parameter's name."""
        return super().bind(*_with_fields(args, kwargs))

    def bind_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Like :meth:`bind`, but the argument may be missing."""
        return super().bind_partial(*_with_fields(args, kwargs))


def to_wire(data: Mapping[str, Any]) -> Any:
    """Return the data of a bound call: its argument, inside a list of positional arguments if it is a list itself."""
    if PARAMETER not in data:
        return []
    argument = data[PARAMETER]
    return [argument] if isinstance(argument, list | tuple) else argument


def from_wire(data: Any, task: str) -> tuple[Any]:
    """Return the argument in a job's data; raises ``InvalidJobError`` for a list without exactly one item."""
    if not isinstance(data, list):
        return (data,)
    if len(data) != 1:
        problem = f"the job's data does not match batch task {task}: expected one argument, not {len(data)}"
        raise incompatible(InvalidJobError(problem))
    return (data[0],)


def batch_types(function: Callable[..., Any], task: str) -> CallTypes:
    """Return the types of one call of a batch task, from its function's hints, which must have the required form."""
    hints, problems = hints_of(function)
    parameter = next(iter(inspect.signature(function).parameters))
    given = getattr(function, "__annotations__", {})

    def call(data: Any) -> Any: ...

    call.__annotations__ = {
        # A hint that cannot be evaluated is passed on, because only typed=True needs it.
        PARAMETER: given[parameter] if parameter in problems else _data_type(hints.get(parameter, Any), task),
        "return": given["return"] if "return" in problems else _result_type(hints.get("return", Any), task),
    }
    return CallTypes(call, task, skip_first=False)


def _one_call(data: Any) -> Any: ...


def _with_fields(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return (args, kwargs) if args or not kwargs else ((dict(kwargs),), {})


def _data_type(hint: Any, task: str) -> Any:
    item = Any if hint is Any else next(iter(get_args(hint)), Any)
    if item is Any or item is BatchJob:
        if hint is Any or _is_sequence(hint):
            return Any
    elif get_origin(item) is BatchJob and _is_sequence(hint):
        (data,) = get_args(item)
        return Any if isinstance(data, TypeVar) else data
    raise ConfigError(f"the parameter of batch task {task!r:.200} must be a list[BatchJob[...]], not {hint}")


def _result_type(hint: Any, task: str) -> Any:
    if hint is Any or hint is None or hint is type(None):
        return hint
    options = get_args(hint) if get_origin(hint) in {Union, type(int | None)} else (hint,)
    lists = [option for option in options if option is not type(None)]
    if len(lists) == 1 and _is_sequence(lists[0]):
        return next(iter(get_args(lists[0])), Any)
    raise ConfigError(f"batch task {task!r:.200} must return a list with one result for each job, or None, not {hint}")


def _is_sequence(hint: Any) -> bool:
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Sequence)
