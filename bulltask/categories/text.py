"""The last resort: what the text of an error says whose type says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bulltask.categories.category import TRANSIENT, ErrorCategory
from bulltask.categories.chain import attribute, text_of

__all__ = ["by_text"]

_LOOKED_AT = 10_000  # characters; a text may be megabytes long

# What Go, Node, curl and the C library call a network or a Redis that is not there at the moment.
_TRANSIENT = re.compile(
    r"connection refused|connection reset|connection timed out|i/o timeout|no route to host|network is unreachable|"
    r"temporary failure in name resolution|"
    r"\b(?:ECONNREFUSED|ECONNRESET|ECONNABORTED|ETIMEDOUT|EPIPE|EHOSTUNREACH|ENETUNREACH|EAI_AGAIN|ENOTFOUND)\b|"
    r"\bLOADING \w+ is loading the dataset",
    re.IGNORECASE,
)


def by_text(chain: Iterable[BaseException]) -> ErrorCategory | None:
    """Judge a chain of which no type, number or status is known; ``None`` when its texts say nothing either."""
    # Not the text of SQLAlchemy's errors: it quotes the statement and its parameters, which may say anything.
    texts = (text_of(each)[:_LOOKED_AT] for each in chain if attribute(each, "orig") is None)
    return TRANSIENT if any(map(_TRANSIENT.search, texts)) else None
