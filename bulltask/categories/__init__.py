"""Error categories: transient (retry), permanent (fail at once) or unknown.

Libraries are recognised by the names of their exception types, so none of them is imported. The modules: ``category``
(the categories), ``chain`` (the causes of an exception), ``known`` (the table of known exceptions, with ``http`` and
``database`` where the type alone does not suffice), ``categorizer`` (the decision, with the user's rules) and
``retry_after`` (the delay that a server asks for).
"""

from __future__ import annotations

from bulltask.categories.categorizer import Categorizer, categorize_error, explicit_category
from bulltask.categories.category import ErrorCategory, Rule
from bulltask.categories.retry_after import retry_after_ms

__all__ = ["Categorizer", "ErrorCategory", "Rule", "categorize_error", "explicit_category", "retry_after_ms"]
