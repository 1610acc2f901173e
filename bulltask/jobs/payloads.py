"""``PayloadCodec``: writes and reads an app's arguments, results and exceptions.

A payload that is not plain JSON is an :class:`Envelope`: compressed, encrypted or signed, in this order. Only
:func:`load` unpickles, and only what :func:`verify` has accepted. What cannot be written raises ``EncodeError``; what
is malformed, not accepted, or cannot be decrypted or verified raises ``DecodeError``.
"""

from __future__ import annotations

import functools
import hmac
import secrets
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import (
    HIDDEN_VALUES,
    BulltaskError,
    DecodeError,
    EncodeError,
    MissingExtraError,
    PayloadTooLargeError,
    check_installed,
    incompatible,
)
from bulltask.jobs.job import JobRef, NewJob, RunningJob
from bulltask.jobs.names import EVERY_QUEUE, address_of, bullmq_name, name_in_app, to_plain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = [
    "CLOUDPICKLE",
    "ENVELOPE_KEY",
    "ENVELOPE_START",
    "JSON",
    "KEY_BYTES",
    "PLAIN",
    "ZLIB",
    "ZSTD",
    "Compression",
    "Envelope",
    "Loaded",
    "PayloadCodec",
    "PayloadContext",
    "PayloadFormat",
    "PayloadSettings",
    "SecretKey",
    "Serializer",
    "check_compression",
    "describe",
    "dump",
    "encrypt",
    "is_envelope",
    "sign",
]

JSON: Final = "json"
CLOUDPICKLE: Final = "cloudpickle"
ZLIB: Final = "zlib"
ZSTD: Final = "zstd"

Serializer = Literal["json", "cloudpickle"]
Compression = Literal["zlib", "zstd", "gzip"]
"""Names of compression methods; ``gzip`` is Celery's alias for zlib."""

KEY_BYTES: Final = 32
"""Length of a key: AES-256, and as many bytes as HMAC-SHA256 returns."""


class SecretKey:
    """A key and its id. A payload contains the ids of the keys that sign and encrypt it."""

    __slots__ = ("id", "secret")

    def __init__(self, key_id: str, secret: bytes) -> None:
        self.id = key_id
        self.secret = secret

    def __repr__(self) -> str:
        return f"<SecretKey {self.id}>"


ENVELOPE_KEY: Final = "bulltask:payload"
"""The only key of the object."""

ENVELOPE_START: Final = f'{{"{ENVELOPE_KEY}":'.encode()
"""The first bytes of every envelope, whichever client has written it."""

VERSION: Final = 1


@value_class
class PayloadContext:
    """What a payload belongs to: it cannot be verified or decrypted in another context.

    Attributes:
        queue: BullMQ's name of the queue, ``{mail}``.
        owner: For arguments, the name of the task; for results and exceptions, the id of the job. Arguments are not
            bound to the id, because dashboards, job schedulers and deduplication copy them to jobs with other ids.
    """

    purpose: Literal["arguments", "result", "error"]
    queue: str
    owner: str


@value_class
class Envelope:
    """A payload, and what is needed to read it.

    Attributes:
        serializer: ``ser``: how the value was serialized.
        body: ``body``: the payload, base64 in the stored form.
        compression: ``zip``: how it was compressed, ``""`` if it was not.
        signing_key: ``key``: the id of the key of the signature.
        signature: ``sig``: the signature, base64.
        encryption_key: ``enc``: the id of the key that encrypts the body.
        nonce: ``iv``: the nonce of the encryption, base64.
    """

    serializer: str
    body: bytes
    compression: str = ""
    signing_key: str = ""
    signature: bytes = b""
    encryption_key: str = ""
    nonce: bytes = b""

    def to_json(self) -> bytes:
        """Return the stored form."""
        texts = {"zip": self.compression, "key": self.signing_key, "sig": _text(self.signature)}
        texts |= {"enc": self.encryption_key, "iv": _text(self.nonce)}
        given = {name: text for name, text in texts.items() if text}
        return codec.encode({ENVELOPE_KEY: {"v": VERSION, "ser": self.serializer, **given, "body": _text(self.body)}})

    @classmethod
    def from_json(cls, data: bytes | str, what: str) -> Envelope:
        """Read the stored form."""
        return cls.from_object(codec.decode(data, what=what), what)

    @classmethod
    def from_object(cls, decoded: Any, what: str) -> Envelope:
        """Read the decoded form."""
        fields = decoded.get(ENVELOPE_KEY) if isinstance(decoded, dict) and len(decoded) == 1 else None
        if not isinstance(fields, dict):
            raise DecodeError(f"{what} is not a payload envelope")
        if (version := fields.get("v")) != VERSION:
            problem = f"{what} has version {version!r:.40} of the payload envelope; update bulltask to read it"
            raise incompatible(DecodeError(problem))
        texts = [fields.get(name, "") for name in ("ser", "body", "zip", "key", "sig", "enc", "iv")]
        if not all(isinstance(text, str) for text in texts):
            raise DecodeError(f"{what} has a malformed payload envelope: its fields must be strings")
        serializer, body, compression, signing_key, signature, encryption_key, nonce = texts
        return cls(
            serializer,
            _bytes(body, what),
            compression,
            signing_key,
            _bytes(signature, what),
            encryption_key,
            _bytes(nonce, what),
        )

    def signed_text(self, context: PayloadContext) -> bytes:
        """Return what the signature covers, before the body."""
        return codec.encode([*self._bound("signature", context), self.serializer, self.compression, self.signing_key])

    def associated_data(self, context: PayloadContext) -> bytes:
        """Return the additional data that the encryption authenticates."""
        parts = self.serializer, self.compression, self.signing_key, _text(self.signature)
        return codec.encode([*self._bound("encryption", context), *parts])

    @staticmethod
    def _bound(use: str, context: PayloadContext) -> list[Any]:
        return [ENVELOPE_KEY, VERSION, use, context.purpose, context.queue, context.owner]


def is_envelope(value: object) -> bool:
    """Return whether a decoded value is an envelope."""
    return isinstance(value, dict) and ENVELOPE_KEY in value


def describe(value: Any) -> str:
    """Return what is known about an envelope without opening it: ``cloudpickle, zstd, encrypted (key e1)``."""
    try:
        envelope = Envelope.from_object(value, "it")
    except DecodeError:
        return "a malformed payload envelope"
    encrypted = f"encrypted (key {envelope.encryption_key})" if envelope.encryption_key else ""
    signed = f"signed (key {envelope.signing_key})" if envelope.signing_key else ""
    parts = [envelope.serializer, envelope.compression, signed, encrypted, f"{len(envelope.body):,} bytes"]
    return ", ".join(part for part in parts if part)


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _bytes(text: str, what: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise DecodeError(f"{what} has a malformed payload envelope: it contains invalid base64") from None


def check_compression(name: str | None) -> None:
    """Raise ``MissingExtraError`` if a compression method is not installed."""
    if name == ZSTD:
        check_installed("zstandard", "zstd", "zstd compression")


def compress(data: bytes, name: str) -> bytes:
    """Return the data, compressed with ``zlib`` or ``zstd``."""
    compressed: bytes = zlib.compress(data) if name == ZLIB else _zstandard().ZstdCompressor().compress(data)
    return compressed


def decompress(data: bytes, name: str, limit: int, what: str) -> bytes:
    """Return data decompressed with the method ``name``, at most ``limit`` bytes; ``what`` is its name in messages."""
    if name not in {ZLIB, ZSTD}:
        raise incompatible(DecodeError(f"{what} is compressed with {name!r:.40}, which bulltask does not support"))
    try:
        found = _from_zlib(data, limit) if name == ZLIB else _from_zstd(data, limit, what)
    except MissingExtraError as exc:
        raise incompatible(DecodeError(f"{what} cannot be decompressed: {exc}")) from None
    if found is None:
        raise DecodeError(f"{what} is not valid {name} data")
    if len(found) > limit:
        raise _too_large(limit, what)
    return found


def _from_zlib(data: bytes, limit: int) -> bytes | None:
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data, limit + 1)
    except zlib.error:
        return None
    return found if reader.eof or len(found) > limit else None


def _from_zstd(data: bytes, limit: int, what: str) -> bytes | None:
    module = _zstandard()
    try:
        if module.frame_content_size(data) > limit:
            raise _too_large(limit, what)
        # The library checks the size in the frame; max_output_size applies to frames without a size.
        found: bytes = module.ZstdDecompressor().decompress(data, max_output_size=limit)
    except module.ZstdError:
        return None
    return found


def _too_large(limit: int, what: str) -> DecodeError:
    return DecodeError(f"{what} is larger than {limit:,} bytes after decompression: raise max_decompressed to read it")


def _zstandard() -> ModuleType:
    check_compression(ZSTD)
    import zstandard  # noqa: PLC0415 - an optional dependency

    return zstandard


_NONCE_BYTES: Final = 12


def encrypt(envelope: Envelope, context: PayloadContext, key: SecretKey) -> Envelope:
    """Return the envelope with an encrypted body."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    body = _cipher(key).encrypt(nonce, envelope.body, envelope.associated_data(context))
    return replace(envelope, body=body, encryption_key=key.id, nonce=nonce)


def decrypt(envelope: Envelope, context: PayloadContext, keys: Sequence[SecretKey], what: str) -> Envelope:
    """Return the envelope with its decrypted body; an envelope that is not encrypted is returned unchanged."""
    if not envelope.encryption_key:
        return envelope
    key = next((key for key in keys if key.id == envelope.encryption_key), None)
    if key is None:
        problem = f"{what} is encrypted with key {envelope.encryption_key!r:.80}"
        raise incompatible(DecodeError(f"{problem}: add this key to payload_encryption_keys for queue {context.queue}"))
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - see _cipher()

    try:
        body = _cipher(key).decrypt(envelope.nonce, envelope.body, envelope.associated_data(context))
    except (InvalidTag, ValueError):  # ValueError: a nonce of the wrong length
        raise DecodeError(
            f"{what} cannot be decrypted: it was changed, copied from another task, queue or job, or encrypted with "
            f"a different key that also has the id {key.id!r}"
        ) from None
    return replace(envelope, body=body)


def _cipher(key: SecretKey) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an optional dependency

    return AESGCM(key.secret)


def sign(envelope: Envelope, context: PayloadContext, key: SecretKey) -> Envelope:
    """Return the envelope with a signature."""
    named = replace(envelope, signing_key=key.id)
    return replace(named, signature=_signature(named, context, key))


def verify(envelope: Envelope, context: PayloadContext, keys: Sequence[SecretKey], what: str) -> None:
    """Check that an envelope is signed with one of the keys, for this context."""
    if not envelope.signature:
        raise DecodeError(f"{what} is pickled but not signed, so it was not loaded: send it with bulltask")
    key = next((key for key in keys if key.id == envelope.signing_key), None)
    if key is None:
        problem = f"{what} is signed with key {envelope.signing_key!r:.80}, so it was not loaded"
        raise incompatible(DecodeError(f"{problem}: add this key to payload_signing_keys if the sender is yours"))
    if not hmac.compare_digest(_signature(envelope, context, key), envelope.signature):
        raise DecodeError(
            f"{what} has an invalid signature, so it was not loaded: it was changed, copied from another task, queue "
            f"or job, or signed with a different key that also has the id {key.id!r}"
        )


def _signature(envelope: Envelope, context: PayloadContext, key: SecretKey) -> bytes:
    # The text is JSON without line breaks, so the boundary between the text and the body is unambiguous.
    return hmac.digest(key.secret, envelope.signed_text(context) + b"\n" + envelope.body, "sha256")


# A pickle can run any code when it is loaded. Therefore, this is the only module that loads pickles, and :func:`load`
# is called only with bytes whose signature has been verified with a key of the app.


def dump(value: object, what: str) -> bytes:
    """Return the value as a pickle."""
    import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415 - most apps never need it

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as exc:
        raise EncodeError(f"{what} cannot be pickled: {type(exc).__name__}: {exc}") from exc
    return data


def load(data: bytes, what: str) -> Any:
    """Return the value of a pickle whose signature has been verified."""
    import cloudpickle  # noqa: PLC0415 - see dump()

    try:
        return cloudpickle.loads(data)
    except (Exception, SystemExit) as exc:
        error = DecodeError(f"{what} cannot be unpickled: {type(exc).__name__}: {exc}")
        # A module or class does not exist in this version of the app.
        raise incompatible(error) if isinstance(exc, ImportError | AttributeError) else error from exc


R = TypeVar("R")


class PayloadFormat(NamedTuple):
    """How a payload is written: its serializer, and its compression if it is large enough."""

    serializer: str = JSON
    compression: str | None = None

    @property
    def is_pickled(self) -> bool:
        """Whether the value is pickled."""
        return self.serializer == CLOUDPICKLE


PLAIN: Final = PayloadFormat()
"""Plain JSON."""


@value_class
class Loaded:
    """A payload that was read; a pickled value already has its Python types."""

    value: Any
    is_pickled: bool = False


@value_class(kw_only=True)
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
    """

    __slots__ = ("_config",)

    def __init__(self, config: PayloadSettings) -> None:
        self._config = config

    @property
    def convert(self) -> Callable[[Any], Any] | None:
        """Converts values that JSON does not support (``convert_untyped``); ``None``: they are refused."""
        return self._config.convert

    def dump_arguments(self, data: Any, queue: str, task: str, form: PayloadFormat, what: str) -> bytes:
        """Return the stored form of a job's data; ``what`` is its name in messages.

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
        """Return what ``call`` returns; if the queue is encrypted, no error of the call shows a value.

        The messages of its errors may contain a part of a payload, also those of the user's types. Instead, an error of
        class ``kind`` says what the call reads or writes (``what``).
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

    def load_arguments(self, job: RunningJob) -> Loaded:
        """Return a job's data."""
        return self.load_data(job.data, JobRef(job.queue, job.id), job.name)

    def load_data(self, data: bytes, ref: JobRef, task: str) -> Loaded:
        """Return a job's data from its stored form; raises the errors of :meth:`load_arguments`."""
        what = f"data of job {ref.id}"
        if not data.startswith(ENVELOPE_START):
            return Loaded(codec.decode(data, what=what))
        envelope = Envelope.from_json(data, what)
        return self._load(envelope, self._arguments(ref.queue, task), self._config.accept_content, what)

    def change_arguments(self, data: Any, queue: str, task: str, change: Callable[[Any], Any]) -> bytes:
        """Return the stored form of a job's decoded data, which may be an envelope, with changed arguments."""
        what, form = f"the arguments of task {task}", PLAIN
        if is_envelope(data):
            envelope, context = Envelope.from_object(data, what), self._arguments(queue, task)
            data = self._load(envelope, context, self._config.accept_content, what).value
            form = PayloadFormat(envelope.serializer)
        return self.dump_arguments(change(data), queue, task, form, what)

    def load_result(self, ref: JobRef, text: str) -> Loaded:
        """Return a job's result from its stored form; raises the errors of :meth:`load_arguments`."""
        what = f"return value of job {ref.id}"
        if not text.startswith(_START_TEXT):
            return Loaded(codec.decode(text or "null", what=what))
        return self._load_result(Envelope.from_json(text, what), self._context("result", ref), what)

    def load_results(self, results: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the results of child jobs (JSON by the jobs' full keys), and whether one of them was pickled."""
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
