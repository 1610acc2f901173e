"""Categories by message, for errors whose type, code and status are unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bulltask.categories.category import TRANSIENT, ErrorCategory
from bulltask.categories.chain import attribute, text_of

__all__ = ["by_text"]

_MAX_CHARS = 10_000  # a message may be megabytes long

# Messages from Go, Node, curl, the C library and Redis for temporary errors of the network or of Redis.
_TRANSIENT = re.compile(
    r"connection refused|connection reset|connection timed out|i/o timeout|no route to host|network is unreachable|"
    r"temporary failure in name resolution|"
    r"\b(?:ECONNREFUSED|ECONNRESET|ECONNABORTED|ETIMEDOUT|EPIPE|EHOSTUNREACH|ENETUNREACH|EAI_AGAIN|ENOTFOUND)\b|"
    r"\bLOADING \w+ is loading the dataset",
    re.IGNORECASE,
)


def by_text(chain: Iterable[BaseException]) -> ErrorCategory | None:
    """Return the category of a chain without a known type, code or status; ``None`` if no message is known."""
    # Messages of SQLAlchemy's errors are skipped, because they contain the statement and its parameters.
    texts = (text_of(each)[:_MAX_CHARS] for each in chain if attribute(each, "orig") is None)
    return TRANSIENT if any(map(_TRANSIENT.search, texts)) else None
