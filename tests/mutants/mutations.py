# mypy: disable-error-code="exhaustive-match"
"""Generate the mutants of a file: small changes of its behavior that a test should detect."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Mutant", "find_mutants"]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
NEVER_RAISED = "FloatingPointError"
# Base classes, decorators, calls and names that only type checkers and readers use.
NOT_EXECUTED = {"Protocol", "TypedDict", "overload", "abstractmethod", "cast", "TypeVar", "TYPE_CHECKING", "__all__"}
SMALL_NUMBER = 10


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    Attributes:
        key: An id that is stable as long as file, class, function or global variable, and changed text stay the same.
        file: The path from the root of the repository.
        kind: The kind of the change.
        first, last: The changed lines.
        within: The function, or ``""`` for code that runs at import.
        source: The complete file with the change.
    """

    key: str
    file: str
    kind: str
    first: int
    last: int
    within: str
    source: str


Change = tuple[str, ast.AST, str]
"""The kind, the node to replace, and the new text."""


def find_mutants(file: str, text: str) -> Iterator[Mutant]:
    """Return all mutants of a file."""
    raw, tree = text.encode(), ast.parse(text)
    starts = [0, *accumulate(len(line) for line in raw.splitlines(keepends=True))]
    seen: Counter[str] = Counter()
    for node, within, place in _nodes(tree, "", ""):
        for kind, part, new in _changes(node):
            first, last, begin, end = _span(part)
            begin, end = starts[first - 1] + begin, starts[last - 1] + end
            name = f"{file}:{place}:{kind}:{raw[begin:end].decode()}:{new}"
            seen[name] += 1
            key = hashlib.sha256(f"{name}:{seen[name]}".encode()).hexdigest()[:12]
            yield Mutant(key, file, kind, first, last, within, (raw[:begin] + new.encode() + raw[end:]).decode())


def _span(node: ast.AST) -> tuple[int, int, int, int]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]


def _nodes(node: ast.AST, within: str, place: str) -> Iterator[tuple[ast.AST, str, str]]:
    """Return the nodes that may be changed, with the function of each, and a more exact place."""
    yield node, within, place
    match node:
        case (
            ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name))
        ):
            place = place if within else f"{place}.{name}"
    for child in _children(node):
        inside, at = within, place
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and isinstance(child, ast.stmt):
            inside, at = f"{within}.{node.name}".lstrip("."), f"{place}.{node.name}"
        yield from _nodes(child, inside, at)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    """Return the children of a node that are executed."""
    if _is_not_executed(node):
        return []
    match node:
        case ast.FunctionDef(args=args, body=body) | ast.AsyncFunctionDef(args=args, body=body):
            return [*args.defaults, *filter(None, args.kw_defaults), *body]
        case ast.ClassDef(body=body):
            return body
        case ast.AnnAssign(value=value):
            return [value] if value else []
        case ast.match_case(guard=guard, body=body):
            return [*filter(None, [guard]), *body]
    return ast.iter_child_nodes(node)


def _is_not_executed(node: ast.AST) -> bool:
    """Return whether code is used only by type checkers and readers."""
    match node:
        case ast.ClassDef(bases=names) | ast.FunctionDef(decorator_list=names):
            return bool(NOT_EXECUTED & _names(names))
        case ast.If(test=name) | ast.Assign(targets=[name]) | ast.Call(func=name):
            return isinstance(name, ast.Name) and name.id in NOT_EXECUTED
        case ast.Subscript(slice=part):  # most of these are types
            return isinstance(part, ast.Name | ast.Attribute | ast.Tuple | ast.Subscript)
    return isinstance(node, ast.Assert | ast.JoinedStr)


def _names(nodes: Iterable[ast.expr]) -> set[str]:
    return {ast.unparse(node).partition("[")[0].rpartition(".")[2] for node in nodes}


def _changes(node: ast.AST) -> Iterator[Change]:
    """Return the changes of this node."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            yield from (("constant", node, repr(new)) for new in _others(value))
        case ast.IfExp(test=test) | ast.If(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):  # these have other changes
                yield "condition", test, f"(not ({ast.unparse(test)}))"
        case ast.Call(func=ast.Name(id="suppress"), args=args):
            yield from (("exception", arg, NEVER_RAISED) for arg in args)
        case ast.ExceptHandler(type=ast.expr() as caught):
            exceptions = caught.elts if isinstance(caught, ast.Tuple) else [caught]
            yield from (("exception", exception, NEVER_RAISED) for exception in exceptions)
    yield from _operators(node)
    yield from _statements(node)


def _others(value: float) -> list[float]:
    if isinstance(value, bool):
        return [not value]
    if abs(value) < SMALL_NUMBER:
        return [value + 1, value - 1]
    return [value * 10, value // 10]  # a change by one would not be observable, as in a wait of one millisecond more


def _operators(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=operators, comparators=right):
            for index, operator in enumerate(operators):
                others = [*operators[:index], COMPARISONS[type(operator)](), *operators[index + 1 :]]
                yield "comparison", node, _text(ast.Compare(left, others, right))
        case ast.BoolOp(op=operator, values=values):
            yield "and/or", node, _text(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", node, _text(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            if type(operator) in ARITHMETIC and not (_is_text(left) or _is_text(right)):
                yield "arithmetic", node, _text(ast.BinOp(left, ARITHMETIC[type(operator)](), right))


def _statements(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "statement removed", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.Break() | ast.Continue():
            yield "statement removed", node, "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "None returned", node, "return None"


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.BinOp(left=left, right=right):
            return _is_text(left) or _is_text(right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
