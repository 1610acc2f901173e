"""Write bulltask's SBOM: a CycloneDX document of the packages that an installation with all extras contains.

Usage: ``python -m tools sbom``, which passes the path of cyclonedx-py and that of the output. It needs no network,
because it describes the packages in .venv, whose versions are locked; tools for development are left out. A component
has the hashes of all files of its version, because a system chooses one of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
NOT_FOR_USERS = {"demo", "dev", "docs"}


def main() -> None:
    """Write the document."""
    program, output = sys.argv[1:]
    command = [program, "environment", "--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"]
    written = subprocess.run(
        [*command, "--output-reproducible", "--of", "JSON", sys.executable], check=True, stdout=subprocess.PIPE
    )
    bom = json.loads(written.stdout)
    extras = {name for name in _extras() if name not in NOT_FOR_USERS}
    installed = set(_closure("bulltask", extras, set()))
    bom["components"] = [part for part in bom["components"] if canonicalize_name(part["name"]) in installed]
    bom["components"].append(_lua_scripts())
    hashes = _locked_hashes()
    for part in bom["components"]:
        part["hashes"] = [{"alg": "SHA-256", "content": text} for text in hashes[canonicalize_name(part["name"])]]
    kept = {part["bom-ref"] for part in [bom["metadata"]["component"], *bom["components"]]}
    bom["dependencies"] = [
        {**row, "dependsOn": sorted(kept.intersection(row.get("dependsOn", ())))}
        for row in bom["dependencies"]
        if row["ref"] in kept
    ]
    Path(output).parent.mkdir(exist_ok=True)
    Path(output).write_text(json.dumps(bom, indent=2) + "\n")
    sys.stdout.write(f"{output}: {len(bom['components'])} components\n")


def _extras() -> Iterator[str]:
    import tomllib  # noqa: PLC0415 - only here

    yield from tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def _closure(name: str, extras: set[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Yield the names of all installed packages that a package requires with these extras."""
    key = canonicalize_name(name), frozenset(extras)
    if key in seen:
        return
    seen.add(key)
    try:
        requirements = requires(name) or []
    except PackageNotFoundError:
        return  # for another platform, or provided by another package
    if name != "bulltask":
        yield key[0]
    for requirement in map(Requirement, requirements):
        if not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield from _closure(requirement.name, set(requirement.extras), seen)


def _locked_hashes() -> dict[str, list[str]]:
    """Return the hashes of all files of each locked version: its source distribution and its wheels."""
    hashes: dict[str, list[str]] = {}
    for name in ("requirements-dev.lock", "tools/requirements-build.txt"):
        for requirement in (ROOT / name).read_text().replace("\\\n", " ").splitlines():
            package, _, rest = requirement.partition("==")
            if rest:
                hashes[canonicalize_name(package)] = re.findall(r"--hash=sha256:([0-9a-f]{64})", rest)
    return hashes


def _lua_scripts() -> dict[str, Any]:
    """Return BullMQ's scripts, which bulltask contains although its package is not installed."""
    package, version = json.loads((ROOT / "bulltask/lua/manifest.json").read_text())["source"].split("==")
    purl = f"pkg:pypi/{package}@{version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": package,
        "version": version,
        "purl": purl,
        "description": "The Lua scripts of BullMQ, copied from its Python package",
        "licenses": [{"license": {"id": "MIT"}}],
    }


if __name__ == "__main__":
    main()
