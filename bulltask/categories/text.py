"""The last resort: categories by the message of an error whose type is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bulltask.categories.category import TRANSIENT, ErrorCategory
from bulltask.categories.chain import attribute, text_of

__all__ = ["by_text"]

_LOOKED_AT = 10_000  # characters; a message may have megabytes

# Messages of Go, Node, curl and the C library for a network or a Redis that is temporarily unavailable.
_TRANSIENT = re.compile(
    r"connection refused|connection reset|connection timed out|i/o timeout|no route to host|network is unreachable|"
    r"temporary failure in name resolution|"
    r"\b(?:ECONNREFUSED|ECONNRESET|ECONNABORTED|ETIMEDOUT|EPIPE|EHOSTUNREACH|ENETUNREACH|EAI_AGAIN|ENOTFOUND)\b|"
    r"\bLOADING \w+ is loading the dataset",
    re.IGNORECASE,
)


def by_text(chain: Iterable[BaseException]) -> ErrorCategory | None:
    """Return the category of a chain without a known type, code or status; ``None`` if no message matches either."""
    # Not the message of SQLAlchemy's errors: it quotes the statement and its parameters.
    texts = (text_of(each)[:_LOOKED_AT] for each in chain if attribute(each, "orig") is None)
    return TRANSIENT if any(map(_TRANSIENT.search, texts)) else None
