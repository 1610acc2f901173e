"""Is an error transient (try again), permanent (fail at once), or unknown? (seed 002 section 5)

Libraries are recognised by the names of their exception types, so none of them is imported. A file each for: the
words, what belongs to an exception (``chain``), what is known (``known``, with ``http`` and ``database`` for what a
type alone does not say), the judge with the user's rules (``categorizer``), and what a server asks for
(``retry_after``).
"""

from __future__ import annotations

from bulltask.categories.categorizer import Categorizer, categorize_error, explicit_category
from bulltask.categories.category import ErrorCategory, Rule
from bulltask.categories.retry_after import retry_after_ms

__all__ = ["Categorizer", "ErrorCategory", "Rule", "categorize_error", "explicit_category", "retry_after_ms"]
