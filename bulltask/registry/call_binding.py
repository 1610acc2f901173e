"""How a task's calls become jobs' data, and how a job's data becomes its task's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bulltask.payloads.envelope import CLOUDPICKLE
from bulltask.ports import Sender
from bulltask.registry.arguments import Arguments
from bulltask.registry.batches import PARAMETER, BatchArguments, batch_types, check_batch_function, from_wire, to_wire
from bulltask.registry.task_options import TaskOptions
from bulltask.typed.call import CallConversion, CallTypes
from bulltask.typed.definitions import Definitions, Schema

__all__ = ["CallBinding"]


class CallBinding:
    """Binds a task's calls: checks arguments against the signature, and converts them by their hints.

    Args:
        function: The function.
        name: The task's name.
        options: The decorator's options.
        sender: Returns the app that sends.
        bind: The function's first parameter is the context.

    Attributes:
        is_batch: Whether the function is called for several jobs; a call then has one argument.
        arguments: The signature of a call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: TaskOptions,
        sender: Callable[[], Sender],
        *,
        bind: bool,
    ) -> None:
        self.function, self.name, self.options, self.bind, self._sender = function, name, options, bind, sender
        self.is_batch = options.batch is not None
        if self.is_batch:
            check_batch_function(function, name, bind=bind, spark=options.spark)
            self.arguments: Arguments = BatchArguments(name)
        else:
            self.arguments = Arguments(function, name, skip_first=bind)

    @functools.cached_property
    def types(self) -> CallTypes:
        """The types of the parameters and the return value, derived from their hints.

        The hints are evaluated on first use, because they may name classes that are defined after the task.
        """
        if self.is_batch:
            return batch_types(self.function, self.name)
        return CallTypes(self.function, self.name, skip_first=self.bind)

    @functools.cached_property
    def conversion(self) -> CallConversion | None:
        """The conversion of arguments and results according to their hints, ``None`` if nothing is converted.

        Raises:
            ConfigError: The task has ``typed=True``, and a hint cannot be enforced.
        """
        typed = self.options.enforced_hints
        conversion = self.types.conversion(self._sender().typed if typed is None else typed)
        return conversion and replace(conversion, hides_values=lambda: bool(self._sender().config.encryption_keys))

    @functools.cached_property
    def result_decoder(self) -> Callable[[Any], Any] | None:
        """Converts a JSON result to the hinted return type; ``None`` if results are not converted.

        With Celery's option ``pydantic=True``, a caller receives the JSON, as in Celery.
        """
        conversion = self.conversion
        if conversion is None or conversion.result is None or self.options.pydantic:
            return None
        return conversion.decode_result

    @functools.cached_property
    def _default_serializer(self) -> str:
        return self._sender().serializer

    def data_schema(self, definitions: Definitions) -> Schema:
        """Return the JSON Schema of a job's data; for a batch task, that of its one argument."""
        if not self.is_batch:
            return self.types.data_schema(definitions)
        schema = self.types.fields[PARAMETER].converter.schema(definitions)
        if schema.get("type") != "array":
            return schema
        return {"type": "array", "prefixItems": [schema], "minItems": 1, "maxItems": 1}

    def check_types(self) -> None:
        """Evaluate the type hints now, so that a worker's children inherit them and errors are raised at startup.

        Raises:
            ConfigError: The task has ``typed=True``, and a hint cannot be enforced.
        """
        _ = self.conversion

    def check_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` if the arguments cannot be completed to form a valid call."""
        self.arguments.bind_partial(args, kwargs)

    def bind_json(self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None) -> Any:
        """Return a call's data: the arguments by parameter name; for a batch task, its one argument.

        They are in their JSON form unless they will be pickled.

        Args:
            args, kwargs: The arguments.
            serializer: The serializer of the call, ``None`` for the task's.

        Raises:
            TypeError: The arguments do not match the signature.
            EncodeError: An argument does not match its type hint.
        """
        data = self._encoded(self.arguments.bind(args, kwargs), serializer)
        return to_wire(data) if self.is_batch else data

    def bind_json_after(
        self, count: int, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None
    ) -> tuple[Any, list[str]]:
        """Bind a call whose first arguments are not known yet; see :meth:`Arguments.bind_after`.

        Raises:
            TypeError, EncodeError: As for :meth:`bind_json`.
        """
        data, names = self.arguments.bind_after(count, args, kwargs)
        return ([], [""]) if self.is_batch else (self._encoded(data, serializer), names)

    def unbind_json(self, data: Any, pickled: Collection[str] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a job's data as positional and keyword arguments, converted to the types of their hints.

        Args:
            data: The data.
            pickled: Names of parameters that are not converted, because their values were pickled.

        Raises:
            InvalidJobError: The data does not match the signature or a type hint.
        """
        args, kwargs = (from_wire(data, self.name), {}) if self.is_batch else self.arguments.unbind(data)
        conversion = self.conversion
        if conversion is None:
            return args, kwargs
        return (conversion.without(pickled) if pickled else conversion).decode_arguments(args, kwargs)

    def pickled_parameters(self, data: Any) -> set[str]:
        """Return the parameters whose values are in pickled data, and are therefore not converted."""
        conversion = self.conversion
        return set(data) if isinstance(data, dict) else set() if conversion is None else set(conversion.items)

    def _encoded(self, data: dict[str, Any], serializer: str | None) -> dict[str, Any]:
        conversion = self.conversion
        if conversion is None:
            return data
        used = serializer or self.options.serializer or self._default_serializer
        return data if used == CLOUDPICKLE else conversion.encode_arguments(data)
