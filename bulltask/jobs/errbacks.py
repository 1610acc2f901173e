"""Error callbacks of a job in a canvas: calls that are stored with it and added when it fails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bulltask.errors import InvalidJobError
from bulltask.jobs.numbers import number
from bulltask.jobs.stored_options import BULLTASK_KEY
from bulltask.value_class import value_class

__all__ = ["ETA", "FAILED_JOB_FIELD", "OF_CHORD", "Errback", "FailedJob", "read_errbacks", "stored_errbacks"]

FAILED_JOB_FIELD: Final = "bulltask:failedJob"
"""The field of a job's hash with the :class:`FailedJob` whose failure caused it to fail; BullMQ ignores it."""

OF_CHORD: Final = "chord"
"""The mark of an error callback of a chord, which is stored with the chord's body."""

ETA: Final = "eta"
"""The option of a stored error callback, among bulltask's, with the epoch milliseconds before which it may not run."""


@value_class
class FailedJob:
    """The job in a canvas that failed first, which caused the others to fail.

    Attributes:
        id, task, queue: Its id, its task's name, and its queue.
    """

    id: str
    task: str
    queue: str

    def to_dict(self) -> dict[str, str]:
        """Return it as an argument of an error callback."""
        return {"id": self.id, "task": self.task, "queue": self.queue}

    @classmethod
    def from_json(cls, text: str) -> FailedJob | None:
        """Read what :meth:`to_dict` returned; ``None`` if it is malformed."""
        try:
            stored = json.loads(text)
            return cls(str(stored["id"]), str(stored["task"]), str(stored["queue"]))
        except (ValueError, TypeError, LookupError):
            return None


@value_class
class Errback:
    """A call without the arguments that describe the failure.

    Attributes:
        queue: The qualified name of its queue, ``bull:{mail}``.
        task: Its task's name.
        data: The other arguments.
        opts: The options of its job, as they are stored.
        parameters: The parameters that receive the failed job's reference, the error message and the traceback; or the
            one that receives the failed job's id; or none. Their names are empty if the arguments are positional.
        cascades: Whether it is also called if a job before this one failed. If it is :data:`OF_CHORD`, it then
            describes this job, the chord's body, as in Celery, and not the member that failed.
    """

    queue: str
    task: str
    data: Any
    opts: Mapping[str, Any]
    parameters: tuple[str, ...]
    cascades: bool | str

    def data_of(self, own: Any, failed: FailedJob, reason: str, trace: str) -> Any:
        """Return the data of its job.

        Args:
            own: Its own arguments: :attr:`data`, unless they are stored in an envelope.
            failed, reason, trace: The failure.
        """
        every: list[Any] = [failed.to_dict(), reason, trace]
        values = [failed.id] if len(self.parameters) == 1 else every[: len(self.parameters)]
        if isinstance(own, list):
            return [*values, *own]
        data = dict(own)
        for name, value in reversed(list(zip(self.parameters, values, strict=True))):
            data[name] = [value, *data[name]] if isinstance(data.get(name), list) else value
        return data

    def opts_of(self, failed: FailedJob, root_id: str | None, now_ms: int) -> dict[str, Any]:
        """Return the options of its job, which descends from the failed one.

        Args:
            failed: The failed job.
            root_id: The id of that job's first ancestor.
            now_ms: The server's time, from which the delay counts.
        """
        own, origin = self.opts.get(BULLTASK_KEY), {"parent": failed.id, "root": root_id or failed.id}
        options = {**(own if isinstance(own, Mapping) else {}), "origin": origin}
        if len(self.parameters) > 1:  # the parameter that receives the reference, to which the worker adds attributes
            options["canvas"] = {"request": self.parameters[0]}
        delay_ms = max(number(self.opts.get("delay")) or 0, (number(options.pop(ETA, None)) or 0) - now_ms)
        delay = {"delay": delay_ms} if delay_ms > 0 else {}
        return {**self.opts, **delay, BULLTASK_KEY: options}


def stored_errbacks(errbacks: Sequence[Errback]) -> str:
    """Return error callbacks as they are stored: JSON text, because msgpack and Lua lose an empty list."""
    fields = [[it.queue, it.task, it.data, it.opts, it.parameters, it.cascades] for it in errbacks]
    return json.dumps(fields, separators=(",", ":"))


def read_errbacks(text: object) -> list[Errback]:
    """Read what :func:`stored_errbacks` returned.

    Raises:
        InvalidJobError: It is malformed.
    """
    try:
        return [
            Errback(queue, task, data, opts, tuple(parameters), cascades)
            for queue, task, data, opts, parameters, cascades in json.loads(str(text))
        ]
    except (ValueError, TypeError):
        raise InvalidJobError(f"the job's error callbacks are malformed: {text!r:.200}") from None
