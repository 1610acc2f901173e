"""What to grant a Redis user (ACL) that lacks a permission."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["advice", "refused_command", "user_of"]

_COMMAND: Final = re.compile(r"no permissions to run the '([^']+)' command")
_KEYS: Final = re.compile(r"permissions to access (a key|one of the keys)|can't access at least one of the keys")
_IN_SCRIPT: Final = re.compile(r"user executing the script can't run")


def advice(text: str, url: str) -> str:
    """Return what to do about a refusal, ``""`` if it has another reason.

    Args:
        text: the server's message.
        url: the server, without its password.
    """
    user = user_of(url)
    if found := _COMMAND.search(text):
        return f". Grant it: ACL SETUSER {user} +{found[1]}"
    if _KEYS.search(text):
        return f". Grant the keys: ACL SETUSER {user} ~bull:* ~bulltask:* (%R~bull:* %R~bulltask:* to read only)"
    if _IN_SCRIPT.search(text):
        return (
            ". Commands inside a script count as well: grant all that this user needs (bulltask.spark.acl, or "
            "docs/how-to/spark.md)"
        )
    return ""


def refused_command(text: str) -> str:
    """Return the command that a user may not run, according to an error; ``""`` if it has another reason."""
    found = _COMMAND.search(text)
    return "" if found is None else found[1]


def user_of(url: str) -> str:
    """Return the name of a URL's user, as the ACL spells it."""
    try:
        return unquote(urlsplit(url).username or "") or "default"
    except ValueError:  # an invalid URL
        return "default"
