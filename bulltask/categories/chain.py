"""The chain of an exception's causes, and attribute access that never raises.

The causes are explicit ones: ``raise … from cause``, and the exception that a wrapper contains as ``.reason`` (urllib,
urllib3), as ``.orig`` (SQLAlchemy) or as its first argument. The implicit ``__context__`` is not a cause. Otherwise, a
bug in an ``except ConnectionError:`` block, whose context is the ``ConnectionError``, would be retried.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["attribute", "chain_of", "first_argument", "text_of", "tree_of"]


def chain_of(exc: BaseException, skip: frozenset[int] = frozenset()) -> Iterator[BaseException]:
    """Yield ``exc`` and its causes, outermost first, each once (causes can form a cycle).

    Args:
        exc: The outermost exception.
        skip: ``id()`` of the exceptions to leave out, together with their causes.
    """
    stack, seen = [exc], set(skip)
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        causes = (first_argument(each), attribute(each, "orig"), attribute(each, "reason"), each.__cause__)
        stack.extend(cause for cause in causes if isinstance(cause, BaseException))


def tree_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield the chain of ``exc``, and the chains of all exceptions in its exception groups."""
    stack, seen = [exc], set[int]()
    while stack:
        for each in list(chain_of(stack.pop(), frozenset(seen))):
            seen.add(id(each))
            yield each
            if isinstance(each, BaseExceptionGroup):
                stack.extend(each.exceptions)


def attribute(obj: object, name: str) -> object:
    """Return an attribute, ``None`` if it is missing or its property raises (httpx's ``request`` may)."""
    try:
        return getattr(obj, name, None)
    except Exception:  # noqa: BLE001 - a broken property must not hide the error itself
        return None


def first_argument(exc: BaseException) -> object:
    """Return ``exc.args[0]``, ``None`` if there is none."""
    arguments = attribute(exc, "args")
    return arguments[0] if isinstance(arguments, tuple) and arguments else None


def text_of(exc: BaseException) -> str:
    """Return ``str(exc)``, ``""`` if that raises."""
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 - as above
        return ""
