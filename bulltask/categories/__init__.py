"""Error categories: transient (retry), permanent (do not retry) or unknown.

Library exceptions are recognized by the names of their types, so no library is imported. The modules:

* ``category``: the categories.
* ``chain``: an exception's causes.
* ``known``: the table of known exceptions; ``http`` and ``database`` for types that have several categories; ``text``
  for messages of unknown types.
* ``categorizer``: the decision, with the user's rules.
* ``retry_after``: the delay that a server requests.
"""

from __future__ import annotations

from bulltask.categories.categorizer import Categorizer, categorize_error, explicit_category
from bulltask.categories.category import ErrorCategory, Rule
from bulltask.categories.retry_after import retry_after_ms

__all__ = ["Categorizer", "ErrorCategory", "Rule", "categorize_error", "explicit_category", "retry_after_ms"]
