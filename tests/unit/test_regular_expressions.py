"""No regular expression of the package takes time that grows faster than the text that it is applied to."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # how re itself reads a pattern; not in the stubs
from time import thread_time
from typing import Any, NamedTuple

import pytest

import bulltask
from bulltask.config.urls import SecretUrl, redact_command, redact_secrets, redact_text, redact_url
from bulltask.errors import did_you_mean
from bulltask.events import Bus, JobStalled
from bulltask.jobs.categories import by_database, by_text
from bulltask.jobs.failure_reasons import error_fingerprint, plain_reason
from bulltask.jobs.names import address_of
from bulltask.lake.formatting import one_line
from bulltask.lake.report.sections import _csv_cell, markdown_text
from bulltask.observe.log import LogListener, configure
from bulltask.registry.results import _rebuild
from bulltask.transport.redis_errors import acl_hint, tls_mismatch_hint

ROOT = Path(bulltask.__file__).parent
METHODS = frozenset({"search", "match", "fullmatch", "sub", "split", "findall", "finditer"})
CALLS = METHODS | {"compile"}
TINY, SHORT, LONG = 24, 6_000, 24_000
"""Characters of texts."""
SUSPICIOUS_S = 0.6e-3
"""Most patterns take about 0.1 ms for a short text; those that take quadratic time take longer than this."""
MAX_GROWTH = 9
"""The time of a linear pattern grows four times from the short to the long text, that of a quadratic one 16 times."""


def seconds(call: Callable[[], object], runs: int = 3) -> float:
    """Return how long a call takes, in the fastest of some runs; one run is enough if it is fast."""
    fastest = float("inf")
    for _ in range(runs):
        start = thread_time()
        call()
        fastest = min(fastest, thread_time() - start)
        if fastest < SUSPICIOUS_S:
            break
    return fastest


class Usage(NamedTuple):
    """A pattern, and a method of it that the package uses."""

    where: str
    pattern: re.Pattern[Any]
    method: str


def seconds_of(pattern: re.Pattern[Any], method: str, text: str, runs: int = 3) -> float:
    """Return how long a method of a pattern takes for a text, in the fastest of some runs."""
    data: Any = text if isinstance(pattern.pattern, str) else text.encode("latin-1", "replace")
    arguments = (type(data)(), data) if method == "sub" else (data,)
    call = getattr(pattern, method)
    return seconds(lambda: list(call(*arguments)) if method == "finditer" else call(*arguments), runs)


@functools.cache
def usages(path: Path) -> list[Usage]:
    """Return the patterns of a module, as it applies them."""
    return list(_usages(path))


def _usages(path: Path) -> Iterator[Usage]:
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _function(node) in CALLS]
    if not calls:
        return
    module = importlib.import_module(".".join(["bulltask", *path.relative_to(ROOT).with_suffix("").parts]))
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in METHODS
    }
    for name, pattern in _patterns(vars(module)):
        for method in {attr for owner, attr in used if owner == name} or {"search"}:
            yield Usage(f"{path.relative_to(ROOT)}: {name}", pattern, method)
    for call in calls:
        function = _function(call)
        if function != "compile":
            pattern = _value(call.args[0], module)
            if pattern is not None:
                yield Usage(f"{path.relative_to(ROOT)}:{call.lineno}", re.compile(pattern), function)


def _function(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "re":
        return function.attr
    return ""


def _patterns(variables: dict[str, Any]) -> Iterator[tuple[str, re.Pattern[Any]]]:
    for name, value in variables.items():
        values = [value]
        while values:
            each = values.pop()
            if type(each) is re.Pattern:
                yield name, each
            elif type(each) in (list, tuple):
                values += each


def _value(expression: ast.expr, module: Any) -> Any:
    try:
        return eval(compile(ast.Expression(expression), "<pattern>", "eval"), vars(module))
    except NameError:
        return None


def texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the beginning, the part that is repeated, and the end of texts that may make a pattern slow."""
    characters, words = set("a0 ."), [""]
    _collect(_parser.parse(pattern.pattern, pattern.flags), characters, words)
    for pair, end in product(product(sorted(characters), repeat=2), ("\0", "")):
        yield "", "".join(pair), end
    for beginning, part in product(words, [*sorted(characters), *filter(None, words)]):
        yield beginning, part, "\0"
        yield "", beginning + part, "\0"


def _collect(parsed: Any, characters: set[str], words: list[str]) -> bool:
    """Collect the ends of character classes, and the words beside repetitions; return whether there is a repetition."""
    here, word, repeats = [], "", False
    for operation, argument in [*parsed, ("END", None)]:
        name = str(operation)
        if name == "LITERAL":
            word += chr(argument)
            continue
        here += [word] if word else []
        word = ""
        repeats |= name.endswith("REPEAT") and argument[1] > 1
        if name in ("IN", "NOT_LITERAL"):
            members = argument if name == "IN" else [(operation, argument)]
            numbers = (number for _, value in members for number in (value if isinstance(value, tuple) else (value,)))
            characters |= {chr(number) for number in numbers if type(number) is int}
        for branch in argument[1] if name == "BRANCH" else argument if isinstance(argument, tuple) else ():
            if isinstance(branch, _parser.SubPattern):
                repeats |= _collect(branch, characters, words)
    words += [word for word in here if repeats and word not in words]
    return repeats


def growth(measure: Callable[..., float], beginning: str, part: str, end: str) -> float:
    """Return by which factor the time grows from a short text to a long one; 1.0 for a text that takes no time."""
    tiny, short, long = (beginning + part * (length // len(part)) + end for length in (TINY, SHORT, LONG))
    if measure(tiny) > 50 * SUSPICIOUS_S:  # exponential
        return float("inf")
    if measure(short) < SUSPICIOUS_S:
        return 1.0
    factor = float("inf")
    for _ in range(5):  # of a busy machine
        factor = min(factor, measure(long, runs=1) / measure(short))
        if factor <= MAX_GROWTH:
            break
    return factor


@functools.cache  # several modules use the same pattern
def slow_texts(pattern: re.Pattern[Any], method: str) -> dict[tuple[str, str, str], float]:
    """Return the texts for which the time grows faster than the text, and how much it grows."""
    measure = functools.partial(seconds_of, pattern, method)
    return {text: factor for text in {*texts(pattern)} if (factor := growth(measure, *text)) > MAX_GROWTH}


# Not the usages themselves: finding them takes two seconds, and each process of a test run collects all tests.
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if "import re\n" in path.read_text()]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_makes_a_regular_expression_slow(path: Path) -> None:
    slow = {usage.where: found for usage in usages(path) if (found := slow_texts(usage.pattern, usage.method))}
    assert not slow


def test_every_regular_expression_is_tested() -> None:
    compiling = {path for path in ROOT.rglob("*.py") if "re.compile(" in path.read_text()}
    assert compiling
    assert compiling <= {path for path in MODULES if usages(path)}


def line_of(job_id: str, *, json: bool) -> str:
    """Return the line of a job with this id."""
    stream = io.StringIO()
    log = configure(level="info", worker_id="w", json=json, stream=stream, hijack_root=False)
    bus = Bus()
    LogListener(log).attach(bus)
    bus.emit(JobStalled(job_id, job_id, None))
    return stream.getvalue()


FUNCTIONS: dict[str, Callable[[str], object]] = {
    "a URL in text": redact_text,
    "a URL in JSON": functools.partial(redact_text, json=True),
    "a URL": redact_url,
    "a secret in text": redact_secrets,
    "a command": lambda text: redact_command([text]),
    "a driver's message": SecretUrl("redis://user:a/b@host").hide_in,
    "a reason": lambda text: error_fingerprint(plain_reason(text)),
    "a JSON reason": lambda text: plain_reason(f'"{text}"'),
    "a name": lambda text: did_you_mean(text, ["aaaa", "a" * SHORT]),
    "one line": one_line,
    "Markdown": markdown_text,
    "CSV": _csv_cell,
    "a category by text": lambda text: by_text([Exception(text)]),
    "a category by database": lambda text: by_database(Exception(text)),
    "a rebuilt exception": lambda text: _rebuild(text, f"Traceback (most recent call last):\nValueError: {text}\n"),
    "a rebuilt exception with another message": lambda text: _rebuild(
        "a", f"Traceback (most recent call last):\n{text}"
    ),
    "an ACL's message": lambda text: acl_hint(f"NOPERM {text}", "redis://host"),
    "a TLS message": lambda text: tls_mismatch_hint(Exception(text), "rediss://host"),
    "a job's key": lambda text: address_of(f"bull:{text}", "bull"),
    "a line of JSON": functools.partial(line_of, json=True),
    "a line of text": functools.partial(line_of, json=False),
}
PARTS = ["a", "a.", "-a", "a://", "@", "://:@", "a=&", "'", '"', "\\u0041", "\x1b", "\u202e", "a\n", ": a\n", "1", " "]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_text_makes_a_function_slow(name: str) -> None:
    function = FUNCTIONS[name]
    slow = {
        part: factor
        for part in PARTS
        if (factor := growth(lambda text, runs=3: seconds(lambda: function(text), runs), "a", part, "\0")) > MAX_GROWTH
    }
    assert not slow


@pytest.mark.parametrize("as_json", [True, False])
def test_a_line_has_the_beginning_of_a_long_id(as_json: bool) -> None:
    line = line_of("x" * 1_000_000, json=as_json)
    assert "xxx" in line
    assert len(line) < 1_000
