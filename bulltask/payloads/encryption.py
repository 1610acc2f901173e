"""Encryption of a body with AES-256-GCM, which also authenticates the envelope and its context."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bulltask.errors import DecodeError, incompatible
from bulltask.payloads.envelope import Envelope, PayloadContext, SecretKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["decrypt", "encrypt"]

_NONCE_BYTES: Final = 12


def encrypt(envelope: Envelope, context: PayloadContext, key: SecretKey) -> Envelope:
    """Return the envelope with an encrypted body."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    body = _cipher(key).encrypt(nonce, envelope.body, envelope.associated_data(context))
    return replace(envelope, body=body, encryption_key=key.id, nonce=nonce)


def decrypt(envelope: Envelope, context: PayloadContext, keys: Sequence[SecretKey], what: str) -> Envelope:
    """Return the envelope with its decrypted body; an envelope that is not encrypted is returned unchanged.

    Raises:
        DecodeError: The envelope is encrypted with another key, was changed, or belongs to another context.
    """
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
