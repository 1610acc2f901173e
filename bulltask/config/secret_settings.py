"""Settings with secrets, wrapped as soon as they are read, before an error can show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bulltask.config.urls import HIDDEN, SecretUrl

__all__ = ["SECRET_FILES", "SecretKeys", "reveal", "wrap_secrets"]

_URLS: Final = ("broker_url", "broker", "result_backend", "backend")
_KEYS: Final = ("payload_signing_keys", "payload_encryption_keys")

SECRET_FILES: Final = ("broker_url", *_KEYS)
"""Settings that can come from a file, which the environment variable with the suffix ``_FILE`` names."""


class SecretKeys:
    """Keys as the user wrote them; only :meth:`get_secret_value` shows them.

    Args:
        value: A string, list or dictionary with keys.
    """

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def get_secret_value(self) -> Any:
        """Return the keys as the user wrote them."""
        return self._value

    def __repr__(self) -> str:
        return repr(HIDDEN)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretKeys) and self._value == other._value

    __hash__ = None  # type: ignore[assignment]  # the value may be a list


def wrap_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the broker URL, Celery's URL for results, and keys wrapped."""
    return {name: _wrap(name, value) for name, value in settings.items()}


def reveal(secret: SecretUrl | SecretKeys) -> Any:
    """Return a wrapped value, for a child process that inherits no memory."""
    return secret.get_secret_value()


def _wrap(name: str, value: Any) -> Any:
    if name in _URLS and isinstance(value, str):
        return SecretUrl(value)
    if name in _KEYS and value is not None and not isinstance(value, SecretKeys):
        return SecretKeys(value)
    return value
