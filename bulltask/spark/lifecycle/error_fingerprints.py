"""Failure reasons made comparable: BullMQ's stored reason as it was raised, and the same without its variable parts.

The patterns are ASCII without nested groups, valid for `re` and for Spark's Java: the SQL uses the same ones.
"""

from __future__ import annotations

import json
import re

__all__ = ["ESCAPE", "FURTHER_LINES", "MAX_LENGTH", "REPLACEMENTS", "UNQUOTABLE", "error_fingerprint", "plain_reason"]

#: One escape of a JSON string. Half a surrogate pair does not count: Java cannot store it.
ESCAPE = (
    r'\\(?:["\\/bfnrt]'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
#: What a JSON string cannot contain between its quotes, once its escapes are removed.
UNQUOTABLE = r'["\\\x00-\x1f]'
#: Everything after the first line.
FURTHER_LINES = r"[\r\n][\s\S]*"
#: Patterns and their replacements, in this order.
REPLACEMENTS = (
    (r"(?<![A-Za-z0-9_])'[^']*'(?![A-Za-z0-9_])", "#"),
    (r'(?<![A-Za-z0-9_])"[^"]*"(?![A-Za-z0-9_])', "#"),
    (r"0[xX][0-9a-fA-F]+", "#"),
    # A UUID, a digest, an object id: hex with at least one digit, so that no word matches.
    (r"(?<![A-Za-z0-9_])(?=[a-fA-F-]*[0-9])[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*(?![A-Za-z0-9_])", "#"),
    (r"[0-9]+", "#"),
)
#: Maximum length of a key: keys are grouped by, and the rest adds little.
MAX_LENGTH = 200

_ESCAPE, _UNQUOTABLE, _FURTHER_LINES = re.compile(ESCAPE), re.compile(UNQUOTABLE), re.compile(FURTHER_LINES)
_REPLACEMENTS = [(re.compile(pattern), by) for pattern, by in REPLACEMENTS]


def plain_reason(reason: str | None) -> str | None:
    """Return the reason as it was raised: BullMQ for Python stores a JSON string, BullMQ for Node.js plain text."""
    if reason is None or len(reason) < 2 or not (reason.startswith('"') and reason.endswith('"')):
        return reason
    if _UNQUOTABLE.search(_ESCAPE.sub("", reason[1:-1])):
        return reason
    return str(json.loads(reason))


def error_fingerprint(reason: str | None) -> str | None:
    """Return what failures of one kind have in common: the first line, with ``#`` for quotes, hex and numbers.

    Args:
        reason: A `plain_reason`.
    """
    if reason is None:
        return None
    key = _FURTHER_LINES.sub("", reason)
    for pattern, by in _REPLACEMENTS:
        key = pattern.sub(by, key)
    return key[:MAX_LENGTH]
