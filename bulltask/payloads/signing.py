"""Signatures: HMAC-SHA256 over an envelope, its context and its body."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace

from bulltask.errors import DecodeError, incompatible
from bulltask.payloads.envelope import Envelope, PayloadContext, SecretKey

__all__ = ["sign", "verify"]


def sign(envelope: Envelope, context: PayloadContext, key: SecretKey) -> Envelope:
    """Return the envelope with a signature."""
    named = replace(envelope, signing_key=key.id)
    return replace(named, signature=_signature(named, context, key))


def verify(envelope: Envelope, context: PayloadContext, keys: Sequence[SecretKey], what: str) -> None:
    """Check the signature.

    Raises:
        DecodeError: The envelope is not signed, is signed with another key, or belongs to another context.
    """
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
