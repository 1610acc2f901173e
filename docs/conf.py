"""Configuration of Sphinx, which builds the site from the Markdown files (``make docs``) and from docstrings.

The source directory is the repository, so that relative links work both on GitHub and on the site. A link to a file
that is not a page, such as a module, downloads that file. Warnings, including dead links and anchors, fail the build.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from html import escape
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import api_pages  # noqa: E402 - found because of the line above

URLS = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["urls"]

project = "bulltask"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
include_patterns = ["*.md", "docs/**.md", "docs/reference/api/*.rst", "examples/*/README.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "bulltask", "tests", "**/node_modules", "history-demo"]
root_doc = "docs/index"
highlight_language = "text"
suppress_warnings = [
    "toc.not_included"
]  # for the examples' READMEs; tests/unit/test_docs.py checks that the index links all pages

html_theme = "furo"
html_title = "bulltask"
html_baseurl = URLS["Documentation"]
html_copy_source = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
# The only large package that the public modules import: make docs needs no Spark.
autodoc_mock_imports = [] if find_spec("pyspark") else ["pyspark"]
napoleon_use_ivar = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# Docstrings also name what is not public; such a name is not linked.
nitpick_ignore_regex = [(r"py:.*", r".*")]

PREVIEW = HERE / "images/dashboard-overview-light.png"
API_PAGE = "docs/reference/api"
API_NAMES = api_pages.write_pages()

_NAVIGATION = dict[str, str]()
_LINK = re.compile(r"^(?:\*|\d+\.) \[.*?\]\((\S+?\.md)\)", re.MULTILINE)
_LIGHT = re.compile(r"^(!\[.*?\]\(\S+-)light(\.\w+\))$", re.MULTILINE)
_SEVERAL = re.compile(r"( +)((?:\w+, )+\w+)(: .*)")


def setup(app: Sphinx) -> None:
    """Connect the handlers that complete pages and docstrings."""
    app.connect("autodoc-skip-member", _skip_class)
    app.connect("autodoc-process-docstring", _prepare_docstring, priority=100)  # before napoleon
    app.connect("source-read", _add_api)
    app.connect("source-read", _add_contents)
    app.connect("source-read", _add_dark_images)
    app.connect("html-page-context", _share_navigation, priority=100)  # before the theme
    app.connect("html-page-context", _mend_links_of_sources)
    app.connect("html-page-context", _add_preview)
    app.connect("build-finished", _add_entry)


def _skip_class(_app: Sphinx, kind: str, _name: str, value: object, skip: bool, _options: object) -> bool:
    # A class that is an attribute, such as Task.MaxRetriesExceededError, is documented where it is defined.
    return skip or (kind == "class" and isinstance(value, type))


def _prepare_docstring(_app: Sphinx, kind: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    if kind in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]  # an empty comment; or napoleon reads "This: that" as a type and a text
    # Sphinx would read "first, second: text" as a field of a type, too.
    result, position = list[str](), 0
    while position < len(lines):
        end = position + 1
        if match := _SEVERAL.fullmatch(lines[position]):
            while end < len(lines) and lines[end].startswith(f"{match[1]} "):
                end += 1
            for name in match[2].split(", "):
                result += [f"{match[1]}{name}{match[3]}", *lines[position + 1 : end]]
        else:
            result.append(lines[position])
        position = end
    lines[:] = result


def _add_api(_app: Sphinx, page: str, source: list[str]) -> None:
    if page == API_PAGE:
        source[0] += API_NAMES


def _add_contents(_app: Sphinx, page: str, source: list[str]) -> None:
    # The links in an index page are also the site's navigation.
    if page not in (root_doc, "docs/adr/README"):
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:] or [f"\n{source[0]}"]:
        caption, _, text = section.partition("\n")
        lines = [":hidden:", *([f":caption: {caption}"] if caption else []), "", *_LINK.findall(text)]
        source[0] += "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def _add_dark_images(app: Sphinx, page: str, source: list[str]) -> None:
    # The theme shows one of both. GitHub shows the light one.
    folder = Path(app.srcdir, page).parent
    for image in {match[0]: match for match in _LIGHT.finditer(source[0])}.values():
        dark = f"{image[1]}dark{image[2]}"
        if (folder / dark.partition("](")[2].rstrip(")")).exists():
            source[0] = source[0].replace(image[0], f"{image[0]}{{.only-light}}\n{dark}{{.only-dark}}")


def _share_navigation(_app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    # Pages that the navigation does not list have the same one as their neighbours. To make it for each page takes a
    # third of the time of a build.
    folder, toctree = posixpath.dirname(page), context["toctree"]
    if folder == API_PAGE or folder.startswith("_modules"):

        def shared(**options: Any) -> str:
            key = f"{folder} {options}"
            if key not in _NAVIGATION:
                _NAVIGATION[key] = toctree(**options)
            return _NAVIGATION[key]

        context["toctree"] = shared


def _mend_links_of_sources(app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    # If names of a module are documented under two public modules, viewcode uses one of them for all links back.
    if page.startswith("_modules/bulltask"):
        objects = app.env.domains.python_domain.objects

        def mended(match: re.Match[str]) -> str:
            target, name = match[1], match[2]
            if name not in objects:
                wrong = max((module for module in api_pages.PUBLIC if name.startswith(f"{module}.")), key=len)
                name = posixpath.basename(target).removesuffix(".html") + name.removeprefix(wrong)
            return f'<a class="viewcode-back" href="{target}#{name}"'

        context["body"] = re.sub(r'<a class="viewcode-back" href="([^"#]+)#([^"]+)"', mended, context["body"])


def _add_preview(
    _app: Sphinx, page: str, _template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    # What chats and social networks show of a link.
    if doctree is not None:
        paragraph = next(doctree.findall(nodes.paragraph), None)
        tags = {
            "og:type": "website",
            "og:site_name": project,
            "og:title": re.sub(r"<[^>]+>", "", context["title"]),
            "og:description": shorten(paragraph.astext() if paragraph else project, 200, placeholder=" …"),
            "og:url": f"{html_baseurl}/{page}.html",
            "og:image": f"{html_baseurl}/_images/{PREVIEW.name}",
        }
        context["metatags"] += "".join(f'<meta property="{key}" content="{escape(tags[key])}">\n' for key in tags)


def _add_entry(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        Path(app.outdir, "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n')
