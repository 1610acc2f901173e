"""Failure reasons as plain text, and their fingerprints: the reason without its variable parts.

The patterns are ASCII without nested groups, and are valid both for `re` and for Spark's Java regexes, because the SQL
uses the same ones.
"""

from __future__ import annotations

import json
import re

__all__ = ["ESCAPE", "FURTHER_LINES", "MAX_LENGTH", "REPLACEMENTS", "UNQUOTABLE", "error_fingerprint", "plain_reason"]

#: An escape sequence of a JSON string. Unpaired surrogates do not match, because Java cannot store them.
ESCAPE = (
    r'\\(?:["\\/bfnrt]'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
#: Characters that a JSON string cannot contain between its quotes after its escapes are removed.
UNQUOTABLE = r'["\\\x00-\x1f]'
#: All text after the first line.
FURTHER_LINES = r"[\r\n][\s\S]*"
#: Patterns and their replacements, in this order.
REPLACEMENTS = (
    (r"(?<![A-Za-z0-9_])'[^']*'(?![A-Za-z0-9_])", "#"),
    (r'(?<![A-Za-z0-9_])"[^"]*"(?![A-Za-z0-9_])', "#"),
    (r"0[xX][0-9a-fA-F]+", "#"),
    # A UUID, a digest, an object id: hex with at least one digit, so that no word matches. Bounded, because the search
    # for the digit would take quadratic time, and Java calls itself for each repetition of a group.
    (r"(?<![A-Za-z0-9_])(?=[a-fA-F-]{0,64}[0-9])[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,}){0,16}(?![A-Za-z0-9_])", "#"),
    (r"[0-9]+", "#"),
)
#: The maximum length of a fingerprint.
MAX_LENGTH = 200

_ESCAPE, _UNQUOTABLE, _FURTHER_LINES = re.compile(ESCAPE), re.compile(UNQUOTABLE), re.compile(FURTHER_LINES)
_REPLACEMENTS = [(re.compile(pattern), by) for pattern, by in REPLACEMENTS]


def plain_reason(reason: str | None) -> str | None:
    """Return the reason as plain text: BullMQ for Python stores it as a JSON string, BullMQ for Node.js as is."""
    if reason is None or len(reason) < 2 or not (reason.startswith('"') and reason.endswith('"')):
        return reason
    if _UNQUOTABLE.search(_ESCAPE.sub("", reason[1:-1])):
        return reason
    return str(json.loads(reason))


def error_fingerprint(reason: str | None) -> str | None:
    """Return the fingerprint of a reason: its first line, with ``#`` for quoted text, hex and numbers.

    Args:
        reason: The result of `plain_reason`.
    """
    if reason is None:
        return None
    fingerprint = _FURTHER_LINES.sub("", reason)
    for pattern, by in _REPLACEMENTS:
        fingerprint = pattern.sub(by, fingerprint)
    return fingerprint[:MAX_LENGTH]
