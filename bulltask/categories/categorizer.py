"""The judge: what the task said, then the user's rules, then what is known."""

from __future__ import annotations

from contextlib import suppress

from bulltask.categories.category import PERMANENT, TRANSIENT, UNKNOWN, ErrorCategory, Rule
from bulltask.categories.chain import chain_of
from bulltask.categories.known import known_category
from bulltask.categories.text import by_text
from bulltask.errors import ConfigError, PermanentError, TransientError

__all__ = ["Categorizer", "categorize_error", "explicit_category"]


class Categorizer:
    """Ordered rules: those of the user, the newest first, then the ones that are known by themselves.

    What is decided, in this order: a ``TransientError`` or ``PermanentError`` anywhere in the chain of causes (the
    outermost wins: it was said last, by code that knew of the inner one); then, for each exception of the chain from
    the outside in, the user's rules and the known ones. So a known outer error hides its cause, and an unknown one is
    judged by it. If nothing in the chain is known, the texts of a lost or refused connection make it transient
    (``RuntimeError("connect ECONNREFUSED …")``). An ``ExceptionGroup`` is transient only if everything in it is, and
    permanent if anything is.
    """

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def register(
        self,
        match: type[BaseException] | tuple[type[BaseException], ...] | str | Rule,
        category: ErrorCategory | None = None,
    ) -> None:
        """Add a rule that goes before all present ones.

        Args:
            match: what the rule is about, one of

                - an exception type or a tuple of them; subclasses match too;
                - the name of a type, so that nothing need be imported: ``"redis.ConnectionError"`` also matches a type
                  defined deeper, in ``redis.exceptions``, a bare ``"OperationalError"`` matches in any module, and
                  subclasses match too;
                - a function from the exception to a category, ``None`` for no opinion. If it raises, it had none, and
                  a note on the job's traceback says so.
            category: what a match means; left out for a function. ``UNKNOWN`` is an answer too: it ends the search.

        Raises:
            ConfigError: the two do not fit together.
        """
        if callable(match) and not isinstance(match, type):
            if category is not None:
                raise ConfigError(f"the rule {match!r} is a function and returns the category itself: leave it out")
            self._rules.insert(0, match)
            return
        if category not in set(ErrorCategory):
            raise ConfigError(f"the category for {match!r} must be transient, permanent or unknown, not {category!r}")
        self._rules.insert(0, _type_rule(match, ErrorCategory(category)))

    def categorize(self, exc: BaseException) -> ErrorCategory:
        """Return what ``exc`` says about the next attempt; never raises."""
        return self._categorize(exc, frozenset())

    def copy(self) -> Categorizer:
        """Return one with the same rules; rules added later to either are not seen by the other."""
        twin = Categorizer()
        twin._rules = self._rules.copy()
        return twin

    def _categorize(self, exc: BaseException, above: frozenset[int]) -> ErrorCategory:
        """``above`` holds the groups that are being judged: something in a group may have that group as its cause."""
        chain = list(chain_of(exc, above))
        marked = _marked(chain)
        if marked is not None:
            return marked
        verdicts = (self._judge(each, above | {id(each)}) for each in chain)
        return next((verdict for verdict in verdicts if verdict is not None), None) or by_text(chain) or UNKNOWN

    def _judge(self, exc: BaseException, above: frozenset[int]) -> ErrorCategory | None:
        for rule in self._rules:
            verdict = _asked(rule, exc)
            if verdict is not None:
                return verdict
        if not isinstance(exc, BaseExceptionGroup):
            return known_category(exc)
        within = {self._categorize(each, above) for each in exc.exceptions}
        if within == {TRANSIENT}:
            return TRANSIENT
        return PERMANENT if PERMANENT in within else UNKNOWN


def categorize_error(exc: BaseException) -> ErrorCategory:
    """Return the category of ``exc`` without any rule of a user."""
    return Categorizer().categorize(exc)


def explicit_category(exc: BaseException) -> ErrorCategory | None:
    """Return what the task itself said with a ``TransientError`` or ``PermanentError`` in the chain, else ``None``.

    For jobs of other BullMQ clients nothing else may stop a retry (PROTOCOL section 5, row 31).
    """
    return _marked(list(chain_of(exc)))


def _marked(chain: list[BaseException]) -> ErrorCategory | None:
    for each in chain:
        if isinstance(each, PermanentError | TransientError):
            return PERMANENT if isinstance(each, PermanentError) else TRANSIENT
    return None


def _type_rule(match: object, category: ErrorCategory) -> Rule:
    if isinstance(match, str) and match:
        return lambda exc: category if any(_is_named(cls, match) for cls in type(exc).__mro__) else None
    types = match if isinstance(match, tuple) else (match,)
    if not types or not all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
        raise ConfigError(f"a rule is for exception types, for a type's name, or a function, not {match!r}")
    return lambda exc: category if isinstance(exc, types) else None


def _is_named(cls: type, name: str) -> bool:
    package, _, last = name.rpartition(".")
    if last != cls.__name__:
        return False
    # Underscores: "csv.Error" and "pickle.UnpicklingError" are defined in _csv and _pickle.
    return not package or f"{cls.__module__}.".lstrip("_").startswith(f"{package.lstrip('_')}.")


def _asked(rule: Rule, exc: BaseException) -> ErrorCategory | None:
    try:
        verdict = rule(exc)
        return None if verdict is None else ErrorCategory(verdict)
    except Exception as error:  # noqa: BLE001 - the job must be settled whatever a user's rule does
        # A note travels with the traceback, so whoever reads why the job failed also reads why the rule did not count.
        with suppress(Exception):
            exc.add_note(f"bulltask: the category rule {rule!r} was left out: {error!r}")
        return None
