"""Keys that sign and encrypt payloads: never shown, not even in a debugger or in Sentry."""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from bulltask.config.parsers import queue_name
from bulltask.config.secret_settings import SecretKeys
from bulltask.errors import ConfigError
from bulltask.jobs.names import EVERY_QUEUE
from bulltask.payloads.envelope import KEY_BYTES, SecretKey

__all__ = ["keys_by_queue", "signing_keys"]

T = TypeVar("T")

_ID: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
_WHAT: Final = f"{KEY_BYTES} random bytes in base64"
_URL_SAFE: Final = str.maketrans("-_", "+/")
_HOW: Final = "make one with: python -c \"import secrets; print('k1:' + secrets.token_urlsafe(32))\""


def signing_keys(value: Any, name: str) -> tuple[SecretKey, ...]:
    """Return the keys in a list, or in a string with spaces or commas between them; the first is used for writing.

    Args:
        value: Keys such as ``"k1:NmQ0…"``: an id, and 32 bytes in base64.
        name: Name of the setting, for the message, which never shows a key.

    Raises:
        ConfigError: A key is invalid.
    """
    return _parse(_signing_keys, value, name)


def keys_by_queue(value: Any, name: str) -> Mapping[str, tuple[SecretKey, ...]]:
    """Return the keys of each queue. The payloads of a queue without keys are not encrypted.

    Args:
        value: A mapping from queue to keys, as for :func:`signing_keys`, or this mapping as a JSON string; ``"*"``
            stands for all other queues.
        name: Name of the setting, for the message.

    Raises:
        ConfigError: The value is invalid.
    """
    return _parse(_keys_by_queue, value, name)


def _parse(parse: Callable[[Any, str], T], value: Any, name: str) -> T:
    """Parse keys, and raise errors here, because the local variables of the functions below contain the keys."""
    secret = value if isinstance(value, SecretKeys) else SecretKeys(value)
    del value
    try:
        return parse(secret.get_secret_value(), name)
    except ConfigError as exc:
        message = str(exc)
    raise ConfigError(message)


def _signing_keys(value: Any, name: str) -> tuple[SecretKey, ...]:
    texts = value.replace(",", " ").split() if isinstance(value, str) else () if value is None else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name} must be a list of keys, `id:base64`, not {type(value).__name__}")
    keys = tuple(_key(text, name) for text in texts)
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError(f"{name} has two keys with the same id; give each key its own")
    return keys


def _keys_by_queue(value: Any, name: str) -> Mapping[str, tuple[SecretKey, ...]]:
    try:
        by_queue = json.loads(value) if isinstance(value, str) else {} if value is None else value
    except ValueError:
        by_queue = None
    if not isinstance(by_queue, Mapping) or not all(isinstance(queue, str) for queue in by_queue):
        raise ConfigError(f"{name} must be a dictionary of keys by queue, or a JSON object, not {type(value).__name__}")
    for queue in by_queue.keys() - {EVERY_QUEUE}:
        if ":" in queue:  # it may be a secret key: do not show it
            raise ConfigError(f"a key of {name} must be the name of a queue, which contains no ':'")
        queue_name(queue, f"a key of {name}")
    return {queue: _signing_keys(keys, f"{name}[{queue!r:.200}]") for queue, keys in by_queue.items()}


def _key(text: str, name: str) -> SecretKey:
    key_id, colon, encoded = text.partition(":")
    if not colon or not _ID.fullmatch(key_id):
        raise ConfigError(f"each key in {name} must be an id of letters, digits, _ . or -, then a colon and {_WHAT}")
    try:
        secret = b64decode(encoded.translate(_URL_SAFE) + "=" * (-len(encoded) % 4), validate=True)
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"key {key_id!r:.200} in {name} must be {_WHAT}; {_HOW}")
    return SecretKey(key_id, secret)
