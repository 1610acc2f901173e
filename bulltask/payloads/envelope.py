"""The envelope: a JSON object around a payload that is not plain JSON."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, Final, Literal

from bulltask.errors import DecodeError, incompatible
from bulltask.jobs import codec

__all__ = [
    "CLOUDPICKLE",
    "ENVELOPE_KEY",
    "ENVELOPE_START",
    "JSON",
    "KEY_BYTES",
    "ZLIB",
    "ZSTD",
    "Compression",
    "Envelope",
    "PayloadContext",
    "SecretKey",
    "Serializer",
    "describe",
    "is_envelope",
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
    """A key and its id. A payload contains the ids of the keys that sign and encrypt it.

    Attributes:
        id: The id.
        secret: The key's bytes.
    """

    __slots__ = ("id", "secret")

    def __init__(self, key_id: str, secret: bytes) -> None:
        self.id, self.secret = key_id, secret

    def __repr__(self) -> str:
        return f"<SecretKey {self.id}>"


ENVELOPE_KEY: Final = "bulltask:payload"
"""The only key of the object."""

ENVELOPE_START: Final = f'{{"{ENVELOPE_KEY}":'.encode()
"""The first bytes of every envelope, whichever client has written it."""

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class PayloadContext:
    """What a payload belongs to: it cannot be verified or decrypted in another context.

    Attributes:
        purpose: What the payload contains: arguments, a result, or an exception.
        queue: BullMQ's name of the queue, ``{mail}``.
        owner: For arguments, the name of the task; for results and exceptions, the id of the job. Arguments are not
            bound to the id, because dashboards, job schedulers and deduplication copy them to jobs with other ids.
    """

    purpose: Literal["arguments", "result", "error"]
    queue: str
    owner: str


@dataclass(frozen=True, slots=True)
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
        """Read the stored form.

        Raises:
            DecodeError: It is malformed, or of a newer version.
        """
        return cls.from_object(codec.decode(data, what=what), what)

    @classmethod
    def from_object(cls, decoded: Any, what: str) -> Envelope:
        """Read the decoded form.

        Raises:
            DecodeError: As for :meth:`from_json`.
        """
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
