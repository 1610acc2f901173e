"""Decides an error's category: explicit categories first, then the user's rules, then the known exceptions."""

from __future__ import annotations

import inspect
from contextlib import suppress

from bulltask.categories.category import PERMANENT, TRANSIENT, UNKNOWN, ErrorCategory, Rule
from bulltask.categories.chain import chain_of
from bulltask.categories.known import known_category
from bulltask.categories.text import by_text
from bulltask.errors import ConfigError, PermanentError, TransientError

__all__ = ["Categorizer", "categorize_error", "explicit_category"]


class Categorizer:
    """Ordered rules: the user's, newest first, then the built-in table of known exceptions.

    The first of these steps that finds a category decides:

    1. A ``TransientError`` or ``PermanentError`` in the chain of causes; the outermost one, if there are several.
    2. For each exception in the chain, outermost first: the user's rules, then the table. A known exception therefore
       overrides its cause, and an unknown exception has the category of its cause.
    3. The message of a lost or refused connection (``RuntimeError("connect ECONNREFUSED …")``): transient.

    An ``ExceptionGroup`` is transient only if all of its exceptions are, and permanent if any of them is.
    """

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def register(
        self,
        match: type[BaseException] | tuple[type[BaseException], ...] | str | Rule,
        category: ErrorCategory | None = None,
    ) -> None:
        """Add a rule that takes precedence over all existing rules.

        Args:
            match: One of the following:

                - an exception type or a tuple of them; subclasses match too;
                - the name of a type, which needs no import: ``"redis.ConnectionError"`` also matches a type that is
                  defined in a submodule such as ``redis.exceptions``; a bare ``"OperationalError"`` matches in any
                  module; subclasses match too;
                - a function that returns the category of an exception, or ``None`` if the rule does not apply. If the
                  function raises, the rule does not apply, and a note is added to the job's traceback.
            category: Category of a match; omit it for a function. ``UNKNOWN`` also ends the search.

        Raises:
            ConfigError: The arguments cannot be combined, or one of them is invalid.
        """
        if callable(match) and not isinstance(match, type):
            if category is not None:
                raise ConfigError(f"the rule {match!r} is a function, which returns the category itself: omit category")
            if inspect.iscoroutinefunction(match):
                raise ConfigError(f"the rule {match!r} must be a plain function, because it is not awaited")
            self._rules.insert(0, match)
            return
        if category not in set(ErrorCategory):
            raise ConfigError(f"the category for {match!r} must be transient, permanent or unknown, not {category!r}")
        self._rules.insert(0, _type_rule(match, ErrorCategory(category)))

    def categorize(self, exc: BaseException) -> ErrorCategory:
        """Return the category of ``exc``; never raises."""
        return self._categorize(exc, frozenset())

    def copy(self) -> Categorizer:
        """Return an independent copy with the same rules."""
        copied = Categorizer()
        copied._rules = self._rules.copy()
        return copied

    def _categorize(self, exc: BaseException, above: frozenset[int]) -> ErrorCategory:
        """``above`` contains the ids of the enclosing groups, because a member may have its own group as its cause."""
        chain = list(chain_of(exc, above))
        explicit = _explicit_category(chain)
        if explicit is not None:
            return explicit
        categories = (self._classify(each, above | {id(each)}) for each in chain)
        return next((category for category in categories if category is not None), None) or by_text(chain) or UNKNOWN

    def _classify(self, exc: BaseException, above: frozenset[int]) -> ErrorCategory | None:
        for rule in self._rules:
            category = _apply_rule(rule, exc)
            if category is not None:
                return category
        if not isinstance(exc, BaseExceptionGroup):
            return known_category(exc)
        members = {self._categorize(each, above) for each in exc.exceptions}
        if members == {TRANSIENT}:
            return TRANSIENT
        return PERMANENT if PERMANENT in members else UNKNOWN


def categorize_error(exc: BaseException) -> ErrorCategory:
    """Return the category of ``exc``, without user rules."""
    return Categorizer().categorize(exc)


def explicit_category(exc: BaseException) -> ErrorCategory | None:
    """Return the category of a ``TransientError`` or ``PermanentError`` in the chain, ``None`` if there is none.

    For jobs that other BullMQ clients sent, no other category prevents a retry.
    """
    return _explicit_category(list(chain_of(exc)))


def _explicit_category(chain: list[BaseException]) -> ErrorCategory | None:
    for each in chain:
        if isinstance(each, PermanentError | TransientError):
            return PERMANENT if isinstance(each, PermanentError) else TRANSIENT
    return None


def _type_rule(match: object, category: ErrorCategory) -> Rule:
    if isinstance(match, str) and match:
        return lambda exc: category if any(_is_named(cls, match) for cls in type(exc).__mro__) else None
    types = match if isinstance(match, tuple) else (match,)
    if not types or not all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
        raise ConfigError(f"a rule must be exception types, the name of a type, or a function, not {match!r}")
    return lambda exc: category if isinstance(exc, types) else None


def _is_named(cls: type, name: str) -> bool:
    package, _, last = name.rpartition(".")
    if last != cls.__name__:
        return False
    # With a leading underscore, because csv.Error and pickle.UnpicklingError are defined in _csv and _pickle.
    return not package or f"{cls.__module__}.".lstrip("_").startswith(f"{package.lstrip('_')}.")


def _apply_rule(rule: Rule, exc: BaseException) -> ErrorCategory | None:
    try:
        category = rule(exc)
        return None if category is None else ErrorCategory(category)
    except Exception as error:  # noqa: BLE001 - a user's rule must not block the job's outcome
        # A note is part of the traceback, so the traceback shows why the rule did not apply.
        with suppress(Exception):
            exc.add_note(f"bulltask: the category rule {rule!r} raised {error!r} and was skipped")
        return None
