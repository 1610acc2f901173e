"""Fixtures of the whole test suite: real servers, and checks that no test leaves processes behind."""

from __future__ import annotations

import functools
import gc
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import pytest
import redis
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from bulltask import App
from bulltask.embedded.server import Flavor, ServerBinary, find_binary, read_version, send_command
from bulltask.registry.tasks import SHARED
from bulltask.testing import worker as testing_server
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.certificates import Certificates, TlsServer
from tests.support.containers import ContainerServer, session_server
from tests.support.distribution import Distribution, sort_longest_first
from tests.support.fork_server import fork_server
from tests.support.processes import SESSION_VARIABLE, LeftoverProcesses
from tests.support.redis_cluster import Cluster
from tests.support.rerun_command import SEED, pytest_runtest_makereport  # noqa: F401 (the latter is a hook)
from tests.support.sentinels import Sentinels
from tests.support.server_clients import client_of
from tests.support.topologies import TOPOLOGY, deselect_other_tests, parameters

if TYPE_CHECKING:
    from tests.support.postgresql import PostgresServer

# Under nohup SIGHUP is ignored, and every program that a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# redis-py reads the metadata of its package for each connection, which takes longer than connecting.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

# No deadline for examples: tests run in parallel, on busy machines.
settings.register_profile("busy", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
# For a quick look: --hypothesis-profile=quick.
settings.register_profile("quick", settings.get_profile("busy"), max_examples=20)
settings.load_profile("busy")

# Tests that take a tenth of a second, measured by `python -m tools slow-tests`. `make test-quick` omits them.
SLOW_TESTS = frozenset((Path(__file__).parent / "slow_tests.txt").read_text().split())

SERVER = os.environ.get("BULLTASK_TEST_SERVER", "valkey")  # "redis": redis-server on PATH; or the path of a program
PROGRAM = read_version(Path(SERVER)) if os.sep in SERVER else None
if PROGRAM is not None:
    SERVER = PROGRAM.flavor


def _find_binary(flavor: Flavor | None = None) -> ServerBinary:
    """Find a server program as ``find_binary`` does, but the one that the environment names first."""
    return PROGRAM if PROGRAM is not None and flavor in {None, SERVER} else find_binary(flavor)


needs_redis_7 = pytest.mark.skipif(
    PROGRAM is not None and PROGRAM.version < (7, 0, 0), reason=f"{PROGRAM} cannot do this; Redis 7.0 and newer can"
)
"""For tests of what bulltask cannot do with Redis 6.2 (docs/reference/servers.md), or that use newer commands."""

testing_server.find_binary = _find_binary  # type: ignore[attr-defined]
FLAVOR = cast("Flavor", SERVER)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Distribution | None:
    """Use `Distribution` for ``--dist loadfile``, the mode of ``make test``."""
    return Distribution(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Switch the garbage collector off during collection, and exclude the collected tests from its later searches.

    The modules and tests live until the end, so searching them takes a quarter of the CPU time and finds nothing.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with the marker ``every_topology`` on several topologies."""
    if found := parameters(metafunc):
        metafunc.parametrize("broker_url", found, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests. Give all workers of pytest-xdist the same order of tests; without xdist it is unchanged."""
    for item in items:
        if item.nodeid.partition("[")[0] in SLOW_TESTS:
            item.add_marker("slow")
    deselect_other_tests(config, items)
    if hasattr(config, "workerinput"):
        sort_longest_first(items)


class ServerFactory(Protocol):
    """Starts another server with the options of `RedisServer.start`, in a directory of its own."""

    def __call__(self, **options: Any) -> RedisServer: ...


@pytest.fixture(scope="session")
def session_id() -> Iterator[str]:
    """Set an environment variable that all processes of this session inherit, to find leftover processes."""
    os.environ[SESSION_VARIABLE] = session_id = secrets.token_hex(8)
    yield session_id
    del os.environ[SESSION_VARIABLE]


@pytest.fixture(scope="session")
def session_processes() -> set[int]:
    """Ids of processes that may outlive a test. Fixtures of a wider scope add the processes that they start."""
    return set()


@pytest.fixture(scope="session")
def _leftovers(session_id: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeftoverProcesses]:
    yield LeftoverProcesses(session_id, tmp_path_factory.getbasetemp())
    fork_server.close()


@pytest.fixture(autouse=True)
def _no_process_is_left_running(_leftovers: LeftoverProcesses, session_processes: set[int]) -> Iterator[None]:
    """Fail a test that leaves a process running, and kill the process."""
    yield
    allowed = session_processes | fork_server.pids
    if not _leftovers.find(allowed):
        return
    try:
        wait_until(lambda: not _leftovers.find(allowed), 3.0, "the end of the test's processes")
    except TimeoutError:
        left = _leftovers.find(allowed)
        _leftovers.end(set(left))
        pytest.fail("the test left processes running: " + "; ".join(f"{pid} {text}" for pid, text in left.items()))


@pytest.fixture(autouse=True)
def _no_receiver_stays_connected() -> Iterator[None]:
    """Disconnect the receivers of the test, which its log records may keep alive: they would slow down later tests."""
    yield
    if (signals := sys.modules.get("bulltask.signals")) is not None:
        for name in signals.__all__:
            if isinstance(found := getattr(signals, name), signals.Signal):
                found._replace(())


@pytest.fixture(autouse=True)
def _no_shared_task_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the shared tasks of the test: the apps of later tests in this process would include them."""
    for name in ("_tasks", "_queues"):
        monkeypatch.setattr(SHARED, name, dict(getattr(SHARED, name)))
    monkeypatch.setattr(SHARED, "_has_handlers", SHARED.have_handlers)


@pytest.fixture(autouse=True)
def _no_signal_stays_blocked() -> Iterator[None]:
    """Fail a test that leaves signals blocked: programs of later tests would inherit the mask and ignore TERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    after = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert after == before, f"the test left signals blocked: {after - before}"


@pytest.fixture(scope="session")
def redis_server(
    session_id: str, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer | ContainerServer]:
    """The in-memory server of this test session, one for each xdist worker. Do not stop it."""
    directory = tmp_path_factory.mktemp("redis")
    start = session_server(directory, FLAVOR) if PROGRAM is None else RedisServer.start(directory, flavor=FLAVOR)
    with start as server:
        if isinstance(server, RedisServer):
            session_processes.add(server.pid)
        yield server


@pytest.fixture(scope="session")
def postgres(session_processes: set[int]) -> Iterator[PostgresServer]:
    """The PostgreSQL server of this test session. A test creates its own database. Do not stop the server."""
    from tests.support.postgresql import PostgresServer, postgres_programs  # noqa: PLC0415 - psycopg is slow to import

    programs = postgres_programs()
    if programs is None or (os.getuid() == 0 and shutil.which("setpriv") is None):
        (pytest.fail if "CI" in os.environ else pytest.skip)("the tests of the outbox need PostgreSQL's programs")
    with tempfile.TemporaryDirectory(prefix="pg-") as directory:
        server = PostgresServer(programs, Path(directory))
        session_processes.add(server.pid)
        yield server
        server.stop()


@pytest.fixture(scope="session")
def session_cluster(
    session_id: str, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster.started(tmp_path_factory.mktemp("cluster"), FLAVOR) as cluster:
        session_processes.update(server.pid for server in cluster.servers)
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Cluster:
    """A cluster of three nodes, which is empty when the test starts. Keep all nodes running and move slots back."""
    session_cluster.flush()
    return session_cluster


@pytest.fixture
def failover_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test: three primaries with a replica each, which replaces its primary after 1.5 s."""
    with Cluster.started(tmp_path / "failover", FLAVOR, replicas=1, node_timeout_ms=1_500) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def session_sentinels(
    session_id: str, session_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sentinels]:
    # No failover on a busy machine: the tests of failovers start their own servers.
    with Sentinels.started(tmp_path_factory.mktemp("sentinels"), FLAVOR, down_after_ms=60_000) as sentinels:
        session_processes.update(sentinels.pids)
        yield sentinels


@pytest.fixture
def single_url(request: pytest.FixtureRequest) -> str:
    """The URL of the session's single server, which is empty when the test starts; for journals."""
    # Not an argument: tests that use redis_server itself cannot run on other topologies.
    server: RedisServer | ContainerServer = request.getfixturevalue("redis_server")
    assert send_command(server.port, "FLUSHALL", timeout=60) == "+OK"  # a client of redis-py would take 5 round trips
    return server.url


@pytest.fixture
def broker_url(request: pytest.FixtureRequest) -> str:
    """The URL of the session's server, or of another topology, which is empty when the test starts."""
    topology = getattr(request, "param", TOPOLOGY)
    if topology == "cluster":
        cluster: Cluster = request.getfixturevalue("cluster")
        return cluster.broker_url
    if topology == "sentinel":
        sentinels: Sentinels = request.getfixturevalue("session_sentinels")
        sentinels.flush()
        return sentinels.url
    if topology not in {"", "single"}:
        pytest.fail(f"BULLTASK_TEST_TOPOLOGY={topology}: use single, cluster or sentinel")
    single_url: str = request.getfixturevalue("single_url")
    return single_url


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    """An app with default settings on the session's server."""
    app = App("tested", broker_url)
    yield app
    app.close()


@pytest.fixture
def redis_client(broker_url: str) -> Iterator[redis.Redis]:
    """A client of ``broker_url`` that returns ``str``; on a cluster a ``redis.RedisCluster``."""
    with client_of(broker_url, decode_responses=True) as client:
        yield client


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of an authority made for this session."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def session_tls_server(
    certificates: Certificates,
    session_id: str,
    session_processes: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TlsServer]:
    if shutil.which("redis-server") is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("the tests of TLS need redis-server, built with TLS")
    server = TlsServer(tmp_path_factory.mktemp("tls-redis"), certificates)
    with server.plain:
        session_processes.add(server.plain.pid)
        yield server


@pytest.fixture
def tls_server(session_tls_server: TlsServer) -> TlsServer:
    """A TLS server that requires client certificates. It is empty when the test starts."""
    with redis.Redis.from_url(session_tls_server.plain.url) as client:
        client.flushall()
    return session_tls_server


@pytest.fixture
def server_factory(tmp_path: Path) -> Iterator[ServerFactory]:
    """Start more servers with given options. All are stopped at the end of the test."""
    servers: list[RedisServer] = []

    def start(**options: Any) -> RedisServer:
        directory = tmp_path / f"server-{len(servers)}"
        servers.append(RedisServer.start(directory, **{"flavor": FLAVOR, **options}))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def rng(record_property: Callable[[str, object], None]) -> random.Random:
    """A random generator with a new seed in each run. A failed test shows it; ``BULLTASK_TEST_SEED`` sets it."""
    seed = int(os.environ.get(SEED) or random.randrange(10**6))
    record_property("seed", seed)
    sys.stdout.write(f"  seed={seed}\n")
    return random.Random(seed)


@pytest.fixture
def wait() -> Callable[..., Any]:
    """`bulltask.testing.worker.wait_until` as a fixture."""
    return wait_until
