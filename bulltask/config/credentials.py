"""The setting ``broker_credential_provider``: the source of the user and password for each new connection."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

from bulltask.errors import BrokerAuthError, BrokerUnavailableError, ConfigError

__all__ = ["Credentials", "credential_provider"]

_SETTING: Final = "broker_credential_provider"
_NAME: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILE: Final = "file://"


class Credentials:
    """Reads the user and password for each new connection, so that they can change while the process is running.

    Args:
        source: One of the following: an object with redis-py's ``get_credentials()``, or its class; a function; the
            name of one of these, ``"module:attribute"``, which is imported on first use; ``"file:///path"`` of a file
            that contains a password. A function or ``get_credentials()`` returns a password, or a user and a password.
    """

    __slots__ = ("_source",)

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self, user: str) -> tuple[str, ...]:
        """Return the arguments of ``AUTH``: a password, or a user and a password.

        Args:
            user: The user in the URL, for a source that returns only a password; ``""`` if there is none.

        Raises:
            ConfigError: The source cannot be imported.
            BrokerAuthError: The file cannot be read, or the source returned something else.
            BrokerUnavailableError: The source raised an error. A later attempt may succeed.
        """
        source = self._source
        if isinstance(source, str) and source.startswith(_FILE):
            return _named(user, _read_file(_path(source)))
        if isinstance(source, str):
            source = self._source = _imported(source)
        if isinstance(source, type):
            source = self._source = source()
        call: Callable[[], object] = getattr(source, "get_credentials", source)
        try:
            found = call()
        except Exception as exc:
            raise BrokerUnavailableError(
                f"cannot connect to Redis: {_SETTING} raised {type(exc).__name__}: {exc}"
            ) from exc
        return _checked(found, user)

    def __repr__(self) -> str:
        return "<Credentials>"


def credential_provider(value: Any, name: str) -> Credentials:
    """Return the credentials in a setting.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message, which does not show it.
    """
    if isinstance(value, str):
        is_valid = bool(_NAME.fullmatch(value)) or (value.startswith(_FILE) and _path(value).is_absolute())
    else:
        is_valid = callable(getattr(value, "get_credentials", value))
    if not is_valid:
        raise ConfigError(
            f"{name} must be a credential provider, a function, 'module:attribute' or 'file:///path', "
            f"not {type(value).__name__}"
        )
    return Credentials(value)


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _read_file(path: Path) -> str:
    try:
        return path.read_text().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as exc:
        raise _rejected(f"cannot read the password in {path} ({_SETTING}): {exc}") from exc


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"cannot import {_SETTING} {name!r:.200}: {exc}") from exc


def _checked(found: object, user: str) -> tuple[str, ...]:
    words = (found,) if isinstance(found, str) else found
    if inspect.iscoroutine(found):
        found.close()
    if (
        not isinstance(words, Sequence)
        or len(words) not in {1, 2}
        or not all(word and isinstance(word, str) for word in words)
    ):
        raise _rejected(
            f"{_SETTING} returned {type(found).__name__}; it must return a password, or a user and a password, and "
            "must not be async"
        )
    return cast("tuple[str, str]", tuple(words)) if len(words) == 2 else _named(user, words[0])


def _named(user: str, password: str) -> tuple[str, ...]:
    return (user, password) if user else (password,)


def _rejected(message: str) -> BrokerAuthError:
    error = BrokerAuthError(message)
    error.handshake_failed = True
    return error
