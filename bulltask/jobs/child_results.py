"""How a job receives the results of its child jobs as an argument.

BullMQ stores the results of a job's children by their full keys, in no particular order. A job in a canvas also
stores, among bulltask's options, which parameter receives the results, and their order:

* ``to``: the name of the parameter. If it is empty, the data is a list, and the results become its first item.
* ``shape``: ``"queue:id"`` for the result of that job; 3 for a list of three results; ``[null, 2]`` for a list of one
  result and a list of two. In a list, ``null`` is the child job whose id is derived from its position
  (:func:`member_id`). Thus, a job with ten thousand children does not store ten thousand ids. The shape is stored as
  JSON text, because msgpack and Lua lose a ``null`` in a list.

A job that ignores the result of the previous step stores :data:`NO_RESULTS`, so that it fails with that step's error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bulltask.errors import InvalidJobError
from bulltask.value_class import value_class

__all__ = ["NO_RESULTS", "REPLACEMENT_FIELD", "ChildResults", "Replacement", "Shape", "member_id"]

REPLACEMENT_FIELD: Final = "bulltask:replacement"
"""The field of a job's hash with its :class:`Replacement`; BullMQ ignores it."""

Shape = None | int | str | Sequence["Shape"]
"""The structure of results; see the module."""

NO_RESULTS: Final = {"to": ""}
"""The stored form for a job in a canvas that waits for other jobs, but receives no result from them."""


def member_id(job_id: str, index: int) -> str:
    """Return the id of the child job whose result is item ``index`` of the list that job ``job_id`` receives."""
    return f"{job_id}.{index}"


@value_class
class ChildResults:
    """The argument that a job receives from its child jobs.

    Attributes:
        parameter: The name of the parameter, ``""`` for the first item of a list.
        shape: The structure of the results.
    """

    parameter: str
    shape: Shape

    def to_wire(self) -> dict[str, object]:
        """Return the stored form."""
        return {"to": self.parameter, "shape": json.dumps(self.shape, separators=(",", ":"))}

    @classmethod
    def from_wire(cls, stored: Mapping[str, Any]) -> ChildResults | None:
        """Read the stored form; ``None`` if the job receives no results.

        Raises:
            InvalidJobError: It is malformed.
        """
        if "shape" not in stored:
            return None
        try:
            parameter, shape = str(stored["to"]), json.loads(stored["shape"])
        except (KeyError, TypeError, ValueError):
            raise InvalidJobError(f"the option for the results of child jobs is malformed: {stored!r:.200}") from None
        return cls(parameter, shape)

    def value(self, results: Mapping[str, Any], base_id: str) -> Any:
        """Return the results in the order and structure of the shape.

        Args:
            results: The child jobs' return values by the full keys of their jobs.
            base_id: The id from which the ids of the child jobs are derived.

        Raises:
            InvalidJobError: A result is missing.
        """
        by_id = {key.rpartition(":")[2]: value for key, value in results.items()}
        return _value(self.shape, base_id, by_id, results)

    def add_to(self, data: Any, results: Mapping[str, Any], job_id: str) -> Any:
        """Return the job's data with the results.

        Args:
            data: The job's data: a mapping, or a list of positional arguments.
            results: The child jobs' return values by the full keys of their jobs.
            job_id: The job's id.

        Raises:
            InvalidJobError: A result is missing, or the data has another form.
        """
        value = self.value(results, job_id)
        if self.parameter and isinstance(data, dict):
            given = data.get(self.parameter)
            # A list is stored only for ``*args``, which the results precede.
            return {**data, self.parameter: value if given is None else [value, *given]}
        if not self.parameter and isinstance(data, list):
            return [value, *data]
        expected = "an object" if self.parameter else "an array"
        raise InvalidJobError(
            f"job {job_id} cannot receive the results of its child jobs: expected {expected}, not {data!r:.200}"
        )


@value_class
class Replacement:
    """The return value of a job whose task has replaced itself with a canvas (``self.replace``).

    Attributes:
        base_id: The id from which the ids of the canvas's last jobs are derived.
        shape: The structure of their results.
    """

    base_id: str
    shape: Shape

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps([self.base_id, self.shape], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Replacement:
        """Read the stored form.

        Raises:
            InvalidJobError: It is malformed.
        """
        try:
            base_id, shape = json.loads(text)
            return cls(str(base_id), shape)
        except (TypeError, ValueError):
            raise InvalidJobError(f"the field {REPLACEMENT_FIELD} is malformed: {text!r:.200}") from None

    def result(self, results: Mapping[str, Any]) -> Any:
        """Return the result of the canvas from those of the job's children.

        Raises:
            InvalidJobError: A result is missing.
        """
        return ChildResults("", self.shape).value(results, self.base_id)


def _value(shape: Shape, job_id: str, by_id: Mapping[str, Any], by_key: Mapping[str, Any]) -> Any:
    """Return the results of a shape; ``job_id`` is the id of the child job that ``None`` stands for."""
    if isinstance(shape, int | Sequence) and not isinstance(shape, str):
        parts: Sequence[Shape] = [None] * shape if isinstance(shape, int) else shape
        return [_value(part, member_id(job_id, index), by_id, by_key) for index, part in enumerate(parts)]
    if shape is None and job_id in by_id:
        return by_id[job_id]
    for key, value in by_key.items():
        if shape is not None and key.endswith(f":{shape}"):
            return value
    raise InvalidJobError(f"the result of child job {shape or job_id} is missing")
