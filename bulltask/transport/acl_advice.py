"""What to grant a user of Redis who may not do something (ACL)."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["advice", "refused_command", "user_of"]

_COMMAND: Final = re.compile(r"no permissions to run the '([^']+)' command")
_KEYS: Final = re.compile(r"permissions to access (a key|one of the keys)|can't access at least one of the keys")
_IN_SCRIPT: Final = re.compile(r"user executing the script can't run")


def advice(text: str, url: str) -> str:
    """What to do about a refusal; ``""`` for one that is about something else.

    Args:
        text: what the server says.
        url: the server, password already hidden.
    """
    user = user_of(url)
    if found := _COMMAND.search(text):
        return f". Grant it: ACL SETUSER {user} +{found[1]}"
    if _KEYS.search(text):
        return (
            f". Grant the keys: ACL SETUSER {user} ~bull:* ~bulltask:* (%R~bull:* %R~bulltask:* to one who only reads)"
        )
    if _IN_SCRIPT.search(text):
        return (
            ". What a script runs counts as well: grant all commands that such a user needs "
            "(bulltask.spark.acl, or docs/how-to/spark.md)"
        )
    return ""


def refused_command(text: str) -> str:
    """The command that an error refuses to a user; ``""`` when it says something else."""
    found = _COMMAND.search(text)
    return "" if found is None else found[1]


def user_of(url: str) -> str:
    """The name of a URL's user, as the ACL has it."""
    try:
        return unquote(urlsplit(url).username or "") or "default"
    except ValueError:  # no URL that could be read
        return "default"
