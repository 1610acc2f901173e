"""``PayloadCodec``: writes and reads an app's arguments, results and exceptions."""

from __future__ import annotations

import functools
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from bulltask.errors import HIDDEN_VALUES, BulltaskError, DecodeError, EncodeError, PayloadTooLargeError, incompatible
from bulltask.jobs import codec
from bulltask.jobs.job import JobRef, NewJob, RunningJob
from bulltask.jobs.names import EVERY_QUEUE, address_of, bullmq_name, name_in_app
from bulltask.jobs.text_forms import to_plain
from bulltask.payloads.compression import compress, decompress
from bulltask.payloads.encryption import decrypt, encrypt
from bulltask.payloads.envelope import (
    CLOUDPICKLE,
    ENVELOPE_START,
    JSON,
    Envelope,
    PayloadContext,
    SecretKey,
    is_envelope,
)
from bulltask.payloads.pickling import dump, load
from bulltask.payloads.signing import sign, verify
from bulltask.value_class import value_class

R = TypeVar("R")

__all__ = ["PLAIN", "Loaded", "PayloadCodec", "PayloadFormat", "PayloadSettings"]


class PayloadFormat(NamedTuple):
    """How a payload is written.

    Attributes:
        serializer: ``json`` or ``cloudpickle``.
        compression: ``zlib`` or ``zstd``, for payloads that are large enough; ``None`` for none.
    """

    serializer: str = JSON
    compression: str | None = None

    @property
    def is_pickled(self) -> bool:
        """Whether the value is pickled."""
        return self.serializer == CLOUDPICKLE

    @property
    def differs_from_json(self) -> bool:
        """Whether the payload may need an envelope even if it is not encrypted."""
        return self != PLAIN


PLAIN: Final = PayloadFormat()
"""Plain JSON."""


@value_class
class Loaded:
    """A payload that was read.

    Attributes:
        value: The value.
        is_pickled: Whether it was pickled, so that it already has its Python types.
    """

    value: Any
    is_pickled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSettings:
    """The parsed settings that decide how payloads are written and read; :class:`Config` adds all others."""

    prefix: str
    queue_hash_tag: bool
    max_payload: int
    convert_untyped: bool
    task_serializer: str
    result_serializer: str
    accept_content: tuple[str, ...]
    result_accept_content: tuple[str, ...] | None
    task_compression: str | None
    result_compression: str | None
    compression_threshold: int
    max_decompressed: int
    max_decompressed_tokens: int
    signing_keys: tuple[SecretKey, ...]
    encryption_keys: Mapping[str, tuple[SecretKey, ...]]

    @property
    def convert(self) -> Callable[[Any], Any] | None:
        """Converts values without a type hint that JSON does not support; ``None``: they are refused."""
        return to_plain if self.convert_untyped else None


class PayloadCodec:
    """Writes payloads as the settings say, and reads only those that the settings accept.

    It is cheap to create: keys and libraries are looked up when a payload needs them.

    Args:
        config: The app's settings.
    """

    __slots__ = ("_config",)

    def __init__(self, config: PayloadSettings) -> None:
        self._config = config

    @property
    def convert(self) -> Callable[[Any], Any] | None:
        """Converts values that JSON does not support (``convert_untyped``); ``None``: they are refused."""
        return self._config.convert

    # ---- write -------------------------------------------------------------------------------------------------------

    def dump_arguments(self, data: Any, queue: str, task: str, form: PayloadFormat, what: str) -> bytes:
        """Return the stored form of a job's data.

        Args:
            data: The arguments.
            queue: The queue's name in the app.
            task: The task's name.
            form: How it is written.
            what: Name of the data in messages.

        Raises:
            EncodeError: The serializer does not support a value.
            PayloadTooLargeError: What would be stored exceeds ``max_payload``, or it could not be decompressed again.
        """
        return self._dump(data, self._arguments(queue, task), form, what)

    def dump_job_data(self, data: Any, queue: str, task: str, what: str) -> bytes:
        """Return the stored data of a job that was not added by a call of a task: JSON, encrypted if its queue is.

        An envelope is stored unchanged, so that data can be copied from another job of the same task.
        """
        if is_envelope(data) or not self.encrypts(queue):
            return codec.encode(data, what=what, limit=self._config.max_payload, convert=self.convert)
        return self.dump_arguments(data, queue, task, PLAIN, what)

    def dump_result(self, value: Any, ref: JobRef, form: PayloadFormat, what: str) -> bytes:
        """Return the stored form of a job's result; raises the errors of :meth:`dump_arguments`."""
        return self._dump(value, self._context("result", ref), form, what)

    def dump_error(self, exc: BaseException, ref: JobRef) -> str:
        """Return the stored form of a job's exception, ``""`` if it cannot be stored."""
        try:
            return self._dump(exc, self._context("error", ref), PayloadFormat(CLOUDPICKLE), "the exception").decode()
        except BulltaskError:
            return ""  # the reason and the traceback are stored in any case

    def dump_error_arguments(self, arguments: Sequence[Any], ref: JobRef) -> str:
        """Return the stored form of the arguments of a job's exception, ``""`` if they cannot be stored."""
        try:
            return self._dump(list(arguments), self._context("error", ref), PLAIN, "the exception's arguments").decode()
        except BulltaskError:
            return ""

    def encrypts(self, queue: str) -> bool:
        """Return whether a queue's payloads are encrypted."""
        return bool(self._config.encryption_keys) and bool(self._encryption_keys(self._name_in_app(queue)))

    def without_values(self, queue: str, what: str, kind: type[BulltaskError], call: Callable[[], R]) -> R:
        """Return what a call returns; if the queue is encrypted, no error of the call shows a value.

        Args:
            queue: The queue.
            what: What the call reads or writes, for the message.
            kind: The exception to raise.
            call: May raise errors whose messages contain a part of a payload, also from code of the user's types.
        """
        if not self.encrypts(queue):
            return call()
        try:
            return call()
        except Exception as exc:
            if isinstance(exc, PayloadTooLargeError) or (isinstance(exc, BulltaskError) and HIDDEN_VALUES in str(exc)):
                raise
            error = kind(f"{what}: {type(exc).__name__} ({HIDDEN_VALUES})")
            if getattr(exc, "is_incompatible", False):
                incompatible(error)
        raise error  # not in the handler: the error with the value would be its context

    def _dump(self, value: Any, context: PayloadContext, form: PayloadFormat, what: str) -> bytes:
        limit, keys = self._config.max_payload, self._encryption_keys(self._name_in_app(context.queue))
        if form == PLAIN and not keys:
            data = codec.encode(value, what=what, limit=limit, convert=self.convert)
            if not data.startswith(ENVELOPE_START):
                return data
            body = data  # a JSON value that looks like an envelope must be put into one
        else:
            encode = dump if form.is_pickled else functools.partial(codec.encode, convert=self.convert)
            write = functools.partial(encode, value, what=what)
            body = self.without_values(context.queue, what, EncodeError, write)
        envelope = self._compressed(Envelope(form.serializer, body), form.compression, what)
        if form.is_pickled:
            envelope = sign(envelope, context, self._config.signing_keys[0])
        if keys:
            envelope = encrypt(envelope, context, keys[0])
        stored = envelope.to_json()
        if not (keys or form.is_pickled or body.startswith(ENVELOPE_START)) and len(stored) >= len(body):
            stored = body
        if len(stored) > limit:
            raise PayloadTooLargeError(
                f"{what}: {len(stored):,} bytes as stored exceed the limit of {limit:,}; store the data elsewhere and "
                "send a reference, or raise max_payload"
            )
        return stored

    def _compressed(self, envelope: Envelope, compression: str | None, what: str) -> Envelope:
        body = envelope.body
        if compression is None or len(body) < self._config.compression_threshold:
            return envelope
        if len(body) > self._config.max_decompressed:
            raise PayloadTooLargeError(
                f"{what}: {len(body):,} bytes before compression exceed the limit of "
                f"{self._config.max_decompressed:,}; store the data elsewhere, or raise max_decompressed"
            )
        if envelope.serializer == JSON and codec.has_more_tokens(body, self._config.max_decompressed_tokens):
            raise PayloadTooLargeError(f"{what} {self._too_many_tokens}, or store the data elsewhere")
        smaller = compress(body, compression)
        if len(smaller) >= len(body):
            return envelope
        return Envelope(envelope.serializer, smaller, compression)

    # ---- read --------------------------------------------------------------------------------------------------------

    def load_arguments(self, job: RunningJob) -> Loaded:
        """Return a job's data.

        Raises:
            DecodeError: It is malformed, not accepted, or its signature or encryption cannot be verified.
        """
        return self.load_data(job.data, JobRef(job.queue, job.id), job.name)

    def load_data(self, data: bytes, ref: JobRef, task: str) -> Loaded:
        """Return a job's data from its stored form; raises the errors of :meth:`load_arguments`."""
        what = f"data of job {ref.id}"
        if not data.startswith(ENVELOPE_START):
            return Loaded(codec.decode(data, what=what))
        envelope = Envelope.from_json(data, what)
        return self._load(envelope, self._arguments(ref.queue, task), self._config.accept_content, what)

    def change_arguments(self, data: Any, queue: str, task: str, change: Callable[[Any], Any]) -> bytes:
        """Return the stored form of a job's data after a change.

        Args:
            data: The decoded data, which may be an envelope.
            queue: The queue's name in the app.
            task: The task's name.
            change: Returns the changed arguments.

        Raises:
            BulltaskError: The data cannot be read or written.
        """
        what, form = f"the arguments of task {task}", PLAIN
        if is_envelope(data):
            envelope, context = Envelope.from_object(data, what), self._arguments(queue, task)
            data, form = (
                self._load(envelope, context, self._config.accept_content, what).value,
                PayloadFormat(envelope.serializer),
            )
        return self.dump_arguments(change(data), queue, task, form, what)

    def load_result(self, ref: JobRef, text: str) -> Loaded:
        """Return a job's result from its stored form; raises the errors of :meth:`load_arguments`."""
        what = f"return value of job {ref.id}"
        if not text.startswith(_START_TEXT):
            return Loaded(codec.decode(text or "null", what=what))
        return self._load_result(Envelope.from_json(text, what), self._context("result", ref), what)

    def load_results(self, results: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the results of child jobs, and whether one of them was pickled.

        Args:
            results: Decoded JSON by the full keys of the jobs.

        Raises:
            DecodeError: As for :meth:`load_arguments`.
        """
        loaded, any_pickled = dict(results), False
        for key, value in results.items():
            if is_envelope(value):
                _, queue, job_id = address_of(key, self._config.prefix)
                what = f"return value of child job {key}"
                envelope = Envelope.from_object(value, what)
                one = self._load_result(envelope, PayloadContext("result", queue, job_id), what)
                loaded[key], any_pickled = one.value, any_pickled or one.is_pickled
        return loaded, any_pickled

    def load_error(self, ref: JobRef, text: str) -> Exception | list[Any] | None:
        """Return a job's exception, or its arguments, from its stored form.

        ``None``: it is not accepted, or cannot be loaded.
        """
        what = f"the exception of job {ref.id}"
        try:
            if not text.startswith(_START_TEXT):
                value = codec.decode(text, what=what)
            else:
                value = self._load_result(Envelope.from_json(text, what), self._context("error", ref), what).value
        except BulltaskError:
            return None
        return value if isinstance(value, Exception | list) else None

    def load_error_by_key(self, key: str, text: str) -> Exception | list[Any] | None:
        """Return a job's exception or its arguments, like :meth:`load_error`, by the full key of the job's hash."""
        _, queue, job_id = address_of(key, self._config.prefix)
        return self.load_error(JobRef(self._name_in_app(queue), job_id), text)

    def fingerprint(self, job: NewJob) -> str:
        """Return a fingerprint that is the same for jobs with the same data, even in different envelopes.

        If the data is in an envelope and the app has keys, the fingerprint is an HMAC. A plain hash would let readers
        of Redis confirm a guess of encrypted data.
        """
        if not job.data.startswith(ENVELOPE_START):
            return job.data.decode()
        what = f"data of job {job.id}"
        envelope = Envelope.from_json(job.data, what)
        keys = [*self._encryption_keys(job.queue), *self._config.signing_keys]
        body = decrypt(envelope, self._arguments(job.queue, job.name), keys, what).body
        return body.decode("ascii", "replace") if not keys else hmac.new(keys[0].secret, body, "sha256").hexdigest()

    def _load_result(self, envelope: Envelope, context: PayloadContext, what: str) -> Loaded:
        given = self._config.result_accept_content
        return self._load(envelope, context, self._config.accept_content if given is None else given, what)

    def _load(self, envelope: Envelope, context: PayloadContext, accepted: Sequence[str], what: str) -> Loaded:
        if envelope.serializer not in accepted:
            setting = "accept_content" if context.purpose == "arguments" else "result_accept_content or accept_content"
            problem = f"{what} is serialized with {envelope.serializer!r:.40}, which this app does not accept"
            raise incompatible(DecodeError(f"{problem}; if the sender is yours, add it to {setting}"))
        envelope = decrypt(envelope, context, self._encryption_keys(self._name_in_app(context.queue)), what)
        is_pickled = envelope.serializer == CLOUDPICKLE
        if is_pickled:
            verify(envelope, context, self._config.signing_keys, what)
        body = envelope.body
        if envelope.compression:
            body = decompress(body, envelope.compression, self._config.max_decompressed, what)
            if not is_pickled and codec.has_more_tokens(body, self._config.max_decompressed_tokens):
                raise DecodeError(f"{what} {self._too_many_tokens} to read it")
        if not is_pickled:
            return Loaded(codec.decode(body, what=what))
        return Loaded(self.without_values(context.queue, what, DecodeError, lambda: load(body, what)), True)

    @property
    def _too_many_tokens(self) -> str:
        limit = self._config.max_decompressed_tokens
        return f"has more than {limit:,} JSON tokens: raise max_decompressed_tokens"

    # ---- contexts and keys -------------------------------------------------------------------------------------------

    def _arguments(self, queue: str, task: str) -> PayloadContext:
        return PayloadContext("arguments", bullmq_name(queue, hash_tag=self._config.queue_hash_tag), task)

    def _context(self, purpose: Any, ref: JobRef) -> PayloadContext:
        return PayloadContext(purpose, bullmq_name(ref.queue, hash_tag=self._config.queue_hash_tag), ref.id)

    def _name_in_app(self, bullmq: str) -> str:
        return name_in_app(bullmq, hash_tag=self._config.queue_hash_tag)

    def _encryption_keys(self, queue: str) -> Sequence[SecretKey]:
        by_queue = self._config.encryption_keys
        return by_queue.get(queue, by_queue.get(EVERY_QUEUE, ())) if by_queue else ()


_START_TEXT: Final = ENVELOPE_START.decode()
