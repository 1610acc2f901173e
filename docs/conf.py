"""How Sphinx builds the site (``make docs``) from the Markdown files, which are written to be read on GitHub as well.

The source directory is the repository, so that a relative link means the same on GitHub and on the site. A link to a
file that is no page, such as a module, offers that file. Any warning, a dead link or anchor included, fails the build.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "bulltask"
extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/**.md", "examples/*/README.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "bulltask", "tests", "**/node_modules", "history-demo"]
root_doc = "docs/index"
html_theme = "furo"
html_title = "bulltask"
html_copy_source = False
highlight_language = "text"
myst_heading_anchors = 4
suppress_warnings = [
    "toc.not_included"
]  # READMEs of examples; tests/unit/test_docs.py knows that the index has all pages

_LINK = re.compile(r"^(?:\*|\d+\.) \[.*?\]\((\S+?\.md)\)", re.MULTILINE)


def setup(app: Sphinx) -> None:
    """Connect what the pages need beyond Markdown."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _add_entry)


def _add_contents(_app: Sphinx, page: str, source: list[str]) -> None:
    # The lists of links in an index are the site's navigation, so that no page names it twice.
    if page not in (root_doc, "docs/adr/README"):
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:] or [f"\n{source[0]}"]:
        caption, _, text = section.partition("\n")
        lines = [":hidden:", *([f":caption: {caption}"] if caption else []), "", *_LINK.findall(text)]
        source[0] += "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def _add_entry(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        Path(app.outdir, "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n')
