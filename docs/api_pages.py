"""Write the pages of the API reference: for each public module one, and one for each class with many names.

``docs/conf.py`` calls this before each build. The pages consist of autodoc's directives, so their text stands in the
docstrings. ``tools/public_surface.py`` has the list of public modules. A name that several modules have is documented
in the first of them; the others refer to it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sphinx.errors import PycodeError
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.public_surface import PUBLIC  # noqa: E402 - found because of the line above

FOLDER = ROOT / "docs/reference/api"
OWN_PAGE = 10
"""A class with more public names than this has its own page."""

BUILTIN_BASES = frozenset("BaseException Enum Exception Generic Protocol dict int list object str tuple".split())
"""Classes whose members are not listed."""


def write_pages() -> str:
    """Write the pages, and return the list of all names for ``docs/reference/api.md``."""
    pages, documented = dict[str, str](), dict[int, str]()
    for module in PUBLIC:
        pages |= _module_pages(module, documented)
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        if old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        path = FOLDER / f"{name}.rst"
        if not path.exists() or path.read_text() != text:  # an unchanged page is not built again
            path.write_text(text)
    return _index(documented)


def _index(documented: Mapping[int, str]) -> str:
    parts = list[str]()
    for name in PUBLIC:
        module = importlib.import_module(name)
        paths = {public: documented.get(id(getattr(module, public)), f"{name}.{public}") for public in _names(module)}
        names = ", ".join(f":py:obj:`{public} <{path}>`" for public, path in paths.items())
        parts.append(f":doc:`{name} <api/{name}>`" + (f": {names}" if names else ""))
    return "\n\n".join(["```{eval-rst}", *parts, "```\n"])


def _module_pages(name: str, documented: dict[int, str]) -> dict[str, str]:
    module = importlib.import_module(name)
    here, pages = list[str](), dict[str, str]()
    for public in _names(module):
        value, path = getattr(module, public), f"{name}.{public}"
        if (first := documented.get(id(value))) is not None:
            here.append(f"* ``{public}``: the same as :py:obj:`{first}`\n")
            continue
        entry = [*_entry(module, public, value, documented)]
        if type(value).__module__ != "builtins" or inspect.isroutine(value) or inspect.isclass(value):
            documented[id(value)] = path
        if inspect.isclass(value) and len(_members(value)) > OWN_PAGE:
            pages[path] = _page(public, [f".. currentmodule:: {name}\n", *entry])
        else:
            here += entry
    own = f".. automodule:: {name}\n   :no-members:\n"
    links = [f"* :doc:`{page}`" for page in pages]
    return {name: _page(name, [own, *links, "", *here])} | pages


def _names(module: Any) -> list[str]:
    return [*getattr(module, "__all__", ())]


def _page(title: str, parts: list[str]) -> str:
    # Orphans, because a sidebar with all of them would triple the time of a build.
    return "\n".join([":orphan:\n", title, "=" * len(title), "", *parts])


def _entry(module: Any, name: str, value: Any, documented: Mapping[int, str]) -> Iterator[str]:
    path = f"{module.__name__}.{name}"
    if inspect.isclass(value):
        others = {base.__name__ for base in value.__mro__ if id(base) in documented or base.__name__ in BUILTIN_BASES}
        yield f".. auto{'exception' if issubclass(value, BaseException) else 'class'}:: {path}"
        if any(id(base) in documented or issubclass(base, BaseException) for base in value.__bases__):
            yield "   :show-inheritance:"
        yield f"   :inherited-members: {', '.join(sorted(others))}\n"
    elif inspect.isroutine(value):
        yield f".. autofunction:: {path}\n"
    else:
        if "__call__" in vars(type(value)) and type(value).__module__.startswith("bulltask."):
            yield f".. py:function:: {name}{inspect.signature(value)}"
        else:
            yield f".. py:data:: {name}"
            if not type(value).__module__.startswith("bulltask."):
                yield f"   :value: {value!r}"
        yield ""
        yield from (f"   {line}" for line in GoogleDocstring(_data_docstring(name, value)).lines())
        yield ""


def _members(kind: type) -> set[str]:
    inherited = {name for base in kind.__mro__ if base.__name__ in BUILTIN_BASES for name in vars(base)}
    return {name for name in dir(kind) if not name.startswith("_")} - inherited


def _data_docstring(name: str, value: Any) -> str:
    """Return the string below the assignment, in whichever module it stands, or the docstring of the object."""
    for module in [*sys.modules]:
        is_here = module.startswith("bulltask.") and vars(sys.modules[module]).get(name) is value
        if is_here and (text := _attribute_docs(module).get(("", name))) is not None:
            return "\n".join(text)
    return (type(value).__module__ != "builtins" and inspect.cleandoc(inspect.getdoc(value) or "")) or ""


def _attribute_docs(module: str) -> Mapping[tuple[str, str], list[str]]:
    try:
        return ModuleAnalyzer.for_module(module).find_attr_docs()
    except PycodeError:
        return {}
