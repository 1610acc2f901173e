"""Error categories: transient (retry), permanent (do not retry) or unknown.

Library exceptions are recognized by their types' names, so no library is imported. The modules are ``category``
(the categories), ``chain`` (an exception's causes), ``known`` (the table of known exceptions, with ``http`` and
``database`` for types that do not determine the category), ``categorizer`` (the decision, with the user's rules) and
``retry_after`` (the delay that a server requests).
"""

from __future__ import annotations

from bulltask.categories.categorizer import Categorizer, categorize_error, explicit_category
from bulltask.categories.category import ErrorCategory, Rule
from bulltask.categories.retry_after import retry_after_ms

__all__ = ["Categorizer", "ErrorCategory", "Rule", "categorize_error", "explicit_category", "retry_after_ms"]
