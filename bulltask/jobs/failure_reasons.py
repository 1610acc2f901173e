"""Failure reasons as plain text, and their fingerprints: the reason without its variable parts."""

from __future__ import annotations

import json
import re
from typing import Final

__all__ = ["MAX_FINGERPRINT", "error_fingerprint", "plain_reason"]

#: An escape sequence of a JSON string. Unpaired surrogates do not match, because Java cannot store them.
_ESCAPE: Final = re.compile(
    r'\\(?:["\\/bfnrt]'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
#: Characters that a JSON string cannot contain between its quotes after its escapes are removed.
_UNQUOTABLE: Final = re.compile(r'["\\\x00-\x1f]')
#: All text after the first line.
_FURTHER_LINES: Final = re.compile(r"[\r\n][\s\S]*")
#: What ``#`` replaces, in this order. The lakes of users have these fingerprints: do not change them.
_VARIABLE_PARTS: Final = tuple(
    map(
        re.compile,
        (
            r"(?<![A-Za-z0-9_])'[^']*'(?![A-Za-z0-9_])",
            r'(?<![A-Za-z0-9_])"[^"]*"(?![A-Za-z0-9_])',
            r"0[xX][0-9a-fA-F]+",
            # A UUID, a digest, an object id: hex with at least one digit, so that no word matches. Bounded, because the
            # search for the digit would take quadratic time.
            r"(?<![A-Za-z0-9_])(?=[a-fA-F-]{0,64}[0-9])[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,}){0,16}(?![A-Za-z0-9_])",
            r"[0-9]+",
        ),
    )
)
#: The maximum length of a fingerprint.
MAX_FINGERPRINT: Final = 200


def plain_reason(reason: str | None) -> str | None:
    """Return the reason as plain text: BullMQ for Python stores it as a JSON string, BullMQ for Node.js as is."""
    if reason is None or len(reason) < 2 or not (reason.startswith('"') and reason.endswith('"')):
        return reason
    if _UNQUOTABLE.search(_ESCAPE.sub("", reason[1:-1])):
        return reason
    return str(json.loads(reason))


def error_fingerprint(reason: str | None) -> str | None:
    """Return the fingerprint of a plain reason: its first line, with ``#`` for quoted text, hex and numbers."""
    if reason is None:
        return None
    fingerprint = _FURTHER_LINES.sub("", reason)
    for pattern in _VARIABLE_PARTS:
        fingerprint = pattern.sub("#", fingerprint)
    return fingerprint[:MAX_FINGERPRINT]
