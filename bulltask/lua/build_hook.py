"""The build hooks: one copies BullMQ's Lua scripts into the package, one makes the links of its description absolute.

The repository contains none of BullMQ's code. The first hook requires one pinned ``bullmq`` distribution for the build,
so the installer fetches it; it copies its scripts to ``bulltask/lua/official/`` and compares each with
``manifest.json``.
A missing, extra or altered script fails the build. If the directory has all scripts, as in a source distribution,
nothing is required and nothing is copied.

Hatchling loads this file by its path while bulltask is not installed: it must not import anything from bulltask.

Run as a program, it prints a manifest of the installed ``bullmq`` distribution (to change the pin, see
CONTRIBUTING.md), or, with the path of a wheel, copies the scripts from it. The wheel is not installed, because an
installed package can run code in every interpreter (with a ``.pth`` file): a release is built from unpacked files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

DISTRIBUTION = "bullmq"
NOTICE = "THIRD_PARTY_NOTICES.md"
SHIPPED_NOTICE = "LICENSE-BullMQ.md"


class OfficialScriptsError(RuntimeError):
    """BullMQ's scripts do not match the manifest."""


class OfficialScriptsHook(BuildHookInterface[Any]):
    """Fills ``bulltask/lua/official/`` before a wheel is made, including one for an editable install."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return the requirements of the build: ``bullmq``, unless the scripts are there."""
        lua = Path(self.root) / "bulltask" / "lua"
        manifest = json.loads((lua / "manifest.json").read_text())
        return [] if is_complete(lua / "official", manifest["scripts"]) else [manifest["source"]]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Copy and check the scripts; hatchling calls this before it collects the files of a distribution."""
        del version, build_data  # the same work for a standard and for an editable wheel
        root = Path(self.root)
        lua = root / "bulltask" / "lua"
        manifest = json.loads((lua / "manifest.json").read_text())
        if not is_complete(lua / "official", manifest["scripts"]):
            put(read_scripts(find_commands(manifest["source"])), manifest, root)


class DescriptionHook(MetadataHookInterface):
    """Sets the description that PyPI shows: ``README.md``, whose relative links lead to the site or the repository."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the description; hatchling calls this when it reads the metadata."""
        text = (Path(self.root) / "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, metadata["urls"])}


def absolute_links(text: str, urls: dict[str, str]) -> str:
    """Return a Markdown text of the repository's root directory whose links work anywhere."""
    site, repository = urls["Documentation"], urls["Source"]

    def absolute(match: re.Match[str]) -> str:
        link, path, anchor = match[1], match[2], match[3] or ""
        if link.startswith("!"):
            return f"{link}{repository}/raw/main/{path}"
        page = path.removesuffix(".md")
        return f"{link}{site}/{page}.html{anchor}" if page != path else f"{link}{repository}/blob/main/{path}{anchor}"

    return re.sub(r"(!?\[[^\[\]]*\]\()(?!https?:|#)([^()\[#\s]+)(#[^()\[\s]*)?(?=\))", absolute, text)


def is_complete(official: Path, expected: dict[str, str]) -> bool:
    """Return whether a directory has exactly the scripts of the manifest, and BullMQ's license."""
    return (official / SHIPPED_NOTICE).is_file() and hashes(read_scripts(official)) == expected


def put(scripts: dict[str, bytes], manifest: dict[str, Any], root: Path) -> None:
    """Check the scripts, and put them into the source tree ``root``."""
    check(scripts, manifest["scripts"], manifest["source"])
    install(scripts, (root / NOTICE).read_bytes(), root / "bulltask" / "lua" / "official")


def find_commands(source: str) -> Path:
    """Return the directory with the scripts of the installed distribution, which must be ``source``."""
    advice = f"pyproject.toml must require {source} for the build, and the build must run in isolation (pip's default)"
    try:
        installed = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise OfficialScriptsError(f"{DISTRIBUTION} is not installed in the build environment: {advice}") from error
    actual = f"{DISTRIBUTION}=={installed.version}"
    if actual != source:
        raise OfficialScriptsError(f"the build environment has {actual}, but the manifest names {source}: {advice}")
    commands = Path(str(installed.locate_file("bullmq/commands")))
    if not commands.is_dir():
        raise OfficialScriptsError(
            f"{actual} has no directory {commands}: its layout has changed, so update {__file__}"
        )
    return commands


def read_scripts(commands: Path) -> dict[str, bytes]:
    """Return the file name and content of every Lua script in ``commands``."""
    return {path.name: path.read_bytes() for path in sorted(commands.glob("*.lua"))}


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return the file name and content of every Lua script in a wheel of ``bullmq``."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if Path(name).match("bullmq/commands/*.lua")]
        return {Path(name).name: wheel.read(name) for name in sorted(names)}


def hashes(scripts: dict[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 (hex) of every script."""
    return {name: hashlib.sha256(body).hexdigest() for name, body in scripts.items()}


def check(scripts: dict[str, bytes], expected: dict[str, str], source: str) -> None:
    """Compare the scripts with the manifest; the error names each one that is missing, extra or altered."""
    actual = hashes(scripts)
    problems = [
        *(f"missing: {name}" for name in sorted(expected.keys() - actual.keys())),
        *(f"not in the manifest: {name}" for name in sorted(actual.keys() - expected.keys())),
        *(
            f"altered: {name} (sha256 {actual[name]}, in the manifest {expected[name]})"
            for name in sorted(actual.keys() & expected.keys())
            if actual[name] != expected[name]
        ),
    ]
    if problems:
        lines = "\n  ".join(problems)
        raise OfficialScriptsError(f"the Lua scripts of {source} do not match bulltask/lua/manifest.json:\n  {lines}")


def install(scripts: dict[str, bytes], notice: bytes, target: Path) -> None:
    """Put these scripts and BullMQ's license into ``target``, and remove all other scripts."""
    target.mkdir(exist_ok=True)
    for stale in target.glob("*.lua"):
        if stale.name not in scripts:
            stale.unlink()
    for name, content in {**scripts, SHIPPED_NOTICE: notice}.items():
        # Replaced atomically, because a worker that starts from an editable install must not read half a script.
        partial = target / f".{name}.{os.getpid()}"
        partial.write_bytes(content)
        partial.replace(target / name)


def main() -> None:
    """Print the manifest of the installed ``bullmq`` distribution, or copy the scripts from a wheel."""
    if sys.argv[1:]:
        root = Path(__file__).parents[2]
        put(read_wheel(Path(sys.argv[1])), json.loads((root / "bulltask/lua/manifest.json").read_text()), root)
        return
    source = f"{DISTRIBUTION}=={metadata.version(DISTRIBUTION)}"
    print(json.dumps({"source": source, "scripts": hashes(read_scripts(find_commands(source)))}, indent=2))


if __name__ == "__main__":
    main()
