"""The image of ``deploy/Dockerfile``, built and run with podman: the quickstart, the probes, and a drain on stop.

The base image is made of this machine's Python and installed packages, so it needs no registry. The containers use the
host's network, and a read-only file system, as in ``deploy/kubernetes``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import docker
import pytest
import redis
from packaging.requirements import Requirement

from bulltask import App
from bulltask.embedded.server import pick_port
from bulltask.testing.worker import wait_until
from tests.support.containers import missing_for_podman, podman

# Packing, importing and building an image of 100 MB takes half a minute, once for all tests.
pytestmark = [pytest.mark.process, pytest.mark.extended, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/shop:test"
PREFIX = Path(sys.base_prefix)
LIBRARY = PREFIX / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
NOT_NEEDED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tkinter", "turtledemo"}
BUILD = f"""
$podman import --quiet --change "ENV PATH={PREFIX}/bin:/bin" --change "ENV PIP_NO_INDEX=1" \
    $1/base.tar localhost/base:test || exit 1
$podman build --isolation chroot --layers=false --pull-never --build-arg BASE=localhost/base:test \
    --build-arg APP=shop --file {ROOT}/deploy/Dockerfile --tag {IMAGE} $1/project || exit 1
"""
SHOP = '''
import os

import redis
from tasks import app


@app.task
def slow():
    """Run until the test opens the gate."""
    client = redis.Redis.from_url(os.environ["BULLTASK_BROKER_URL"])
    client.rpush("started", os.getpid())
    client.blpop("gate", 60)
    return "finished"
'''


def packages(name: str, extras: frozenset[str] = frozenset()) -> Iterator[Distribution]:
    """Yield an installed package and those that it requires, some of them repeatedly."""
    found = distribution(name)
    yield found
    for required in map(Requirement, found.requires or ()):
        if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield from packages(required.name, frozenset(required.extras))


def pack_base(directory: Path) -> None:
    """Write ``base.tar``: a shell, Python with pip, and what bulltask requires."""
    files: dict[Path, str] = {Path("/bin/sh"): "bin/sh", PREFIX / "bin/python3": f"{PREFIX}/bin/python"}
    for folder in (LIBRARY, LIBRARY / "lib-dynload"):
        entries = (path for path in folder.iterdir() if path.name not in {*NOT_NEEDED, "lib-dynload"})
        files |= {path: str(path) for path in entries if not path.name.startswith("config-")}
    for package in (*packages("bulltask", frozenset({"embedded"})), *packages("pip")):
        listed = (file for file in package.files or () if package.name != "bulltask" and ".." not in file.parts)
        files |= {Path(str(file.locate())): f"{LIBRARY}/site-packages/{file}" for file in listed}
    linked = [path for path in files if path.suffix == ".so" or "bin" in path.parts]
    libraries = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    files |= {Path(path): path for path in re.findall(r"(?:=> |^\t)(/\S+) \(0x", libraries, re.MULTILINE)}
    temporary = tarfile.TarInfo("tmp")
    temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
    with tarfile.open(directory / "base.tar", "w", dereference=True) as image:
        image.addfile(temporary)
        for path, name in files.items():
            if path.exists():
                image.add(path, name.lstrip("/"), filter=lambda file: None if "__pycache__" in file.name else file)


@pytest.fixture(scope="module")
def engine(session_processes: set[int]) -> Iterator[docker.DockerClient]:
    """A container engine that has built the image of a project with the quickstart's files."""
    if missing := missing_for_podman():
        pytest.skip(f"no container engine: {missing} is missing")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="podman-")))
        project = directory / "project"
        shutil.copytree(ROOT / "examples" / "quickstart", project)
        (project / "shop.py").write_text(SHOP)
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir"]
        subprocess.run([*build, str(project), str(ROOT)], check=True)
        [wheel] = project.glob("*.whl")
        (project / "requirements.txt").write_text(f"./{wheel.name}[embedded]\n")
        pack_base(directory)
        address = stack.enter_context(podman(BUILD, directory, session_processes))
        yield stack.enter_context(closing(docker.DockerClient(base_url=address, timeout=60)))


@pytest.fixture
def run(engine: docker.DockerClient, broker_url: str) -> Iterator[Any]:
    """Starts containers of the image, which end with the test."""
    started = []

    def start(*command: str) -> Any:
        options = {"read_only": True, "tmpfs": {"/tmp": ""}, "environment": {"BULLTASK_BROKER_URL": broker_url}}
        started.append(engine.containers.run(IMAGE, [*command], detach=True, network_mode="host", **options))
        return started[-1]

    yield start
    for container in started:
        container.remove(force=True)


def logged(container: Any, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, container.logs().decode().splitlines())
    return [line for line in lines if line["event"] == event]


def test_the_image_runs_the_quickstart_answers_probes_and_drains_on_stop(
    run: Any, engine: docker.DockerClient, broker_url: str, redis_client: redis.Redis
) -> None:
    assert engine.images.get(IMAGE).attrs["Config"]["User"] == "10001:10001"
    port = pick_port()
    worker = run("bulltask", "worker", "-c", "1", "--metrics-port", str(port))
    wait_until(lambda: worker.exec_run(["bulltask", "health", "ready"]).exit_code == 0, 60, "a ready worker")
    assert worker.exec_run(["bulltask", "health", "live"]).exit_code == 0
    for probe in ("livez", "readyz"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{probe}", timeout=10) as answer:
            assert answer.status == 200

    sender = run("python", "send.py")
    assert sender.wait(timeout=60)["StatusCode"] == 0
    printed = re.sub(r"(?<=sent job )\S+", "0192…", sender.logs().decode())
    assert printed in (ROOT / "examples" / "quickstart" / "README.md").read_text()

    with closing(App("quickstart", broker_url)) as app, ThreadPoolExecutor() as threads:
        running, waiting = [app.send_task("shop.slow") for _ in range(2)]
        assert redis_client.blpop(["started"], 60)
        stop = threads.submit(worker.stop, timeout=45)
        wait_until(lambda: logged(worker, "Worker stopping"), 30, "the signal")
        redis_client.rpush("gate", "open")
        stop.result(timeout=60)
        assert running.get(timeout=10) == "finished"
        assert waiting.state == "waiting"
    assert logged(worker, "Worker stopping")[0]["running"] == 1
    assert worker.wait(timeout=10)["StatusCode"] == 0
