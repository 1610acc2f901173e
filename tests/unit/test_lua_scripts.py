"""The Lua scripts have the reviewed hashes: BullMQ's in the manifest, bulltask's in ``bulltask_scripts.json``.

Run as a program, this file updates the hashes of bulltask's scripts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bulltask.errors import ScriptIntegrityError
from bulltask.lua import loader, wrappers

ROOT = Path(__file__).parent.parent.parent
LUA = ROOT / "bulltask" / "lua"
HASHES = LUA / "bulltask_scripts.json"
UPDATE = ".venv/bin/python tests/unit/test_lua_scripts.py"
MANIFEST = json.loads((LUA / "manifest.json").read_text())


def bulltask_scripts() -> list[Path]:
    return sorted((LUA / "bulltask").glob("*.lua"))


def bulltask_hashes() -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in bulltask_scripts()}


def flip_bit(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.fixture
def copied_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the scripts and make the loader read the copies."""
    for folder in ("official", "bulltask"):
        shutil.copytree(LUA / folder, tmp_path / folder)
    for file in ("manifest.json", "bulltask_scripts.json"):
        shutil.copy(LUA / file, tmp_path)
    monkeypatch.setattr(loader, "_file", tmp_path.joinpath)
    for find in (loader.official_script, loader.bulltask_script):
        monkeypatch.setattr(loader, find.__name__, find.__wrapped__)  # without the cache of other tests
    return tmp_path


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """Return a copy of the files that a build needs, without the official scripts."""
    tree = tmp_path / "tree"
    shutil.copytree(LUA, tree / "bulltask" / "lua", ignore=shutil.ignore_patterns("official", "__pycache__"))
    for name in [
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "THIRD_PARTY_NOTICES.md",
        ".gitignore",
        "pyspark_bulltask.py",
    ]:
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture
def bullmq(tmp_path: Path) -> Path:
    """Return a directory that looks like an installation of the pinned ``bullmq`` distribution."""
    site = tmp_path / "site"
    shutil.copytree(LUA / "official", site / "bullmq" / "commands", ignore=shutil.ignore_patterns("LICENSE*"))
    set_version(site, MANIFEST["source"].partition("==")[2])
    return site


def set_version(site: Path, version: str) -> None:
    for old in site.glob("*.dist-info"):
        shutil.rmtree(old)
    info = site / f"bullmq-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bullmq\nVersion: {version}\n")


def build(tree: Path, bullmq: Path, target: str = "wheel") -> subprocess.CompletedProcess[str]:
    """Build a distribution without network access, with the given installation of ``bullmq``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(tree / "dist")]
    environment = {**os.environ, "PYTHONPATH": str(bullmq)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def wheel_contents(tree: Path) -> dict[str, bytes]:
    [wheel] = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_every_official_script_loads_with_the_key_count_in_its_file_name() -> None:
    assert len(MANIFEST["scripts"]) == 50
    for file_name in MANIFEST["scripts"]:
        name, _, keys = Path(file_name).stem.rpartition("-")
        script = loader.official_script(name)
        assert (script.name, script.key_count) == (name, int(keys))
        assert script.sha == hashlib.sha1(script.source).hexdigest()


def test_a_script_uses_the_number_of_keys_in_its_file_name() -> None:
    script = loader.official_script("moveToActive")
    assert script.key_count == 11 == max(int(key) for key in re.findall(rb"KEYS\[(\d+)\]", script.source))


def test_a_script_is_read_once() -> None:
    assert loader.official_script("moveToFinished") is loader.official_script("moveToFinished")


@pytest.mark.parametrize(
    ("folder", "file", "advice"),
    [("official", "addLog-2.lua", "pip install -e"), ("bulltask", "addDeferred-11.lua", "to accept your change")],
)
def test_one_modified_byte_fails_the_load(copied_scripts: Path, folder: str, file: str, advice: str) -> None:
    find, name = getattr(loader, f"{folder}_script"), file.partition("-")[0]
    assert f"{name}-{find(name).key_count}.lua" == file
    loader.all_scripts()
    path = copied_scripts / folder / file
    flip_bit(path)
    for load in (lambda: find(name), loader.all_scripts):
        with pytest.raises(ScriptIntegrityError, match=rf"{re.escape(str(path))} was altered.*reinstall.*{advice}"):
            load()


@pytest.mark.parametrize(("folder", "file"), [("official", "addLog-2.lua"), ("bulltask", "addDeferred-11.lua")])
def test_a_missing_script_fails_the_load(copied_scripts: Path, folder: str, file: str) -> None:
    (copied_scripts / folder / file).unlink()
    for load in (lambda: getattr(loader, f"{folder}_script")(file.partition("-")[0]), loader.all_scripts):
        with pytest.raises(ScriptIntegrityError, match=rf"{file} cannot be read.*reinstall"):
            load()


@pytest.mark.parametrize("find", [loader.official_script, loader.bulltask_script])
def test_an_unknown_script_raises_an_integrity_error(find: object) -> None:
    assert callable(find)
    with pytest.raises(ScriptIntegrityError, match="0 scripts named 'moveToMars'"):
        find("moveToMars")


def test_scripts_are_read_from_a_zip_file(tmp_path: Path) -> None:
    archive = tmp_path / "bulltask.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for path in (ROOT / "bulltask").rglob("*"):
            if path.suffix in {".py", ".lua", ".json"} and path.name != "addLog-2.lua":
                target.write(path, path.relative_to(ROOT))
    program = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom bulltask.lua import loader, wrappers\n"
        "print(loader.__file__, wrappers.add_once('addStandardJob').sha, loader.bulltask_script('addOnce').sha)\n"
        "loader.official_script('addLog')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, archive], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == [
        str(archive / "bulltask" / "lua" / "loader.py"),
        wrappers.add_once("addStandardJob").sha,
        loader.bulltask_script("addOnce").sha,
    ]
    assert re.search(r"ScriptIntegrityError: .*addLog-2\.lua cannot be read", run.stderr)


@pytest.mark.slow
def test_the_build_requires_the_distribution_that_the_manifest_names_unless_the_scripts_are_there(
    source_tree: Path, bullmq: Path
) -> None:
    program = (
        "from hatchling import build as b; print(b.get_requires_for_build_wheel(), b.get_requires_for_build_sdist())"
    )

    def required() -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=source_tree, capture_output=True, text=True, check=True).stdout.strip()

    assert required() == f"[{MANIFEST['source']!r}] [{MANIFEST['source']!r}]"
    assert build(source_tree, bullmq).returncode == 0
    assert required() == "[] []"
    flip_bit(source_tree / "bulltask/lua/official/pause-7.lua")
    assert required() == f"[{MANIFEST['source']!r}] [{MANIFEST['source']!r}]"


@pytest.mark.slow
def test_a_release_is_built_from_a_wheel_of_bullmq_that_is_not_installed_and_carries_the_scripts(
    source_tree: Path, bullmq: Path, tmp_path: Path
) -> None:
    wheel = tmp_path / "bullmq.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("poisoned.pth", "import sys; sys.exit('a package of the build ran code')")
        for path in sorted(bullmq.glob("bullmq/commands/*")):
            archive.write(path, path.relative_to(bullmq))
    hook = source_tree / "bulltask/lua/build_hook.py"
    unpacked = subprocess.run([sys.executable, hook, wheel], capture_output=True, text=True, check=False)
    assert (unpacked.returncode, unpacked.stderr) == (0, "")
    run = build(source_tree, tmp_path / "nothing", "sdist")
    assert run.returncode == 0, run.stderr
    [sdist] = (source_tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive_of_sources:
        archive_of_sources.extractall(tmp_path, filter="data")
    released = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert build(released, tmp_path / "nothing").returncode == 0
    shipped = [name for name in wheel_contents(released) if "/official/" in name]
    assert len(shipped) == len(MANIFEST["scripts"]) + 1


def test_an_altered_script_in_a_wheel_of_bullmq_is_not_unpacked(source_tree: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "bullmq.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("bullmq/commands/pause-7.lua", "return 1")
    hook = source_tree / "bulltask/lua/build_hook.py"
    run = subprocess.run([sys.executable, hook, wheel], capture_output=True, text=True, check=False)
    assert "altered: pause-7.lua" in run.stderr
    assert not (source_tree / "bulltask/lua/official").exists()


def test_a_wheel_contains_the_official_scripts_and_their_license(source_tree: Path, bullmq: Path) -> None:
    run = build(source_tree, bullmq)
    assert run.returncode == 0, run.stderr
    files = wheel_contents(source_tree)
    shipped = {Path(name).name: body for name, body in files.items() if "/official/" in name}
    assert b"BullForce Labs AB" in shipped.pop("LICENSE-BullMQ.md")
    assert {name: hashlib.sha256(body).hexdigest() for name, body in shipped.items()} == MANIFEST["scripts"]
    assert any(name.endswith("licenses/THIRD_PARTY_NOTICES.md") for name in files)
    assert "pyspark_bulltask.py" in files, "the module by which Spark finds the data source"


def test_one_modified_byte_fails_the_build(source_tree: Path, bullmq: Path) -> None:
    flip_bit(bullmq / "bullmq" / "commands" / "pause-7.lua")
    run = build(source_tree, bullmq)
    assert run.returncode != 0
    assert "altered: pause-7.lua" in run.stderr


def test_a_modified_manifest_fails_the_build(source_tree: Path, bullmq: Path) -> None:
    manifest = source_tree / "bulltask" / "lua" / "manifest.json"
    pin = MANIFEST["scripts"]["pause-7.lua"]
    manifest.write_text(manifest.read_text().replace(pin, pin[::-1]))
    run = build(source_tree, bullmq)
    assert run.returncode != 0
    assert "altered: pause-7.lua" in run.stderr


def test_a_missing_and_an_extra_script_fail_the_build(source_tree: Path, bullmq: Path) -> None:
    commands = bullmq / "bullmq" / "commands"
    (commands / "pause-7.lua").rename(commands / "pauseAll-7.lua")
    run = build(source_tree, bullmq)
    assert run.returncode != 0
    assert "missing: pause-7.lua" in run.stderr
    assert "not in the manifest: pauseAll-7.lua" in run.stderr


def test_another_version_of_bullmq_fails_the_build(source_tree: Path, bullmq: Path) -> None:
    set_version(bullmq, "2.99.0")
    run = build(source_tree, bullmq)
    assert run.returncode != 0
    assert f"the build environment has bullmq==2.99.0, but the manifest names {MANIFEST['source']}" in run.stderr


def test_a_build_without_bullmq_fails(source_tree: Path, tmp_path: Path) -> None:
    run = build(source_tree, tmp_path)
    assert run.returncode != 0
    assert "bullmq is not installed in the build environment" in run.stderr


def test_a_build_removes_scripts_that_the_manifest_no_longer_lists(source_tree: Path, bullmq: Path) -> None:
    official = source_tree / "bulltask" / "lua" / "official"
    official.mkdir()
    (official / "removed-1.lua").write_text("return 1")
    run = build(source_tree, bullmq)
    assert run.returncode == 0, run.stderr
    assert {path.name for path in official.glob("*.lua")} == set(MANIFEST["scripts"])


def test_the_hashes_of_bulltasks_scripts_are_up_to_date() -> None:
    assert json.loads(HASHES.read_text()) == bulltask_hashes(), f"if every change is intended, run: {UPDATE}"


def test_every_bulltask_script_loads_by_name() -> None:
    for path in bulltask_scripts():
        name, _, keys = path.stem.rpartition("-")
        script = loader.bulltask_script(name)
        assert (script.key_count, script.source) == (int(keys), path.read_bytes())


def test_every_bulltask_script_documents_its_keys_arguments_and_result() -> None:
    for path in bulltask_scripts():
        text = path.read_text()
        header = text.partition("]]")[0]
        assert header.startswith("--[["), f"{path.name} does not start with a comment --[[ … ]]"
        named = {int(key) for key in re.findall(r"KEYS\[(\d+)\]", header)}
        used = {int(key) for key in re.findall(r"KEYS\[(\d+)\]", text)}
        expected = set(range(1, int(path.stem.rpartition("-")[2]) + 1))
        assert named == used == expected, f"{path.name}: the header lists exactly the KEYS[n] of the file name"
        arguments = {int(index) for index in re.findall(r"ARGV\[(\d+)\]", text)}
        explained = {int(index) for index in re.findall(r"ARGV\[(\d+)\]", header)}
        assert arguments <= explained, f"{path.name}: the header explains every ARGV[n]"
        assert re.search(r"(?i)\breturns\b", header), f"{path.name}: the header documents the result"


if __name__ == "__main__":
    HASHES.write_text(json.dumps(bulltask_hashes(), indent=2) + "\n")
