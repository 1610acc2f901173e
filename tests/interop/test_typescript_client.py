"""The TypeScript client of ``bulltask gen-ts``: tsc compiles it, and Node.js calls Python with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.conftest import HERE
from tests.support.programs import ROOT
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.interop, pytest.mark.process]

APP = """
from bulltask import App
from tests.support.typed_tasks import register

app = App("shop")
register(app)


@app.task(name="greet", queue="mail", priority=5, expires=60, max_retries=4, time_limit=30, keep_logs=7)
def greet({parameters}, greeting: str = "Hello") -> str:
    \"\"\"Greet a person. */ It is polite.\"\"\"
    return f"{{greeting}}, {{{first}}}"
"""
PROGRAM = """
import { Client, type Tasks } from "./client.js";

const client = new Client({ connection: { port: Number(process.argv[2]) } });
const placed = new Date("2026-11-23T10:30:00Z").toISOString();
const order = { id: "00000000-0000-0000-0000-000000000007", placed, items: [{ sku: "tea", price: "2.50", count: 2 }] };
const receipt = await client.call("shop.checkout", { order, terms: "P1D" }, {}, 60_000);
const total: string = receipt.total;
const address = { street: "Main 1", postCode: "12345" };
const moved = await client.call("shop.move", { cards: [{ number: "1", holder: address }] }, {}, 60_000);
const job = await client.add("greet", { person: "Ada" });
const wrong = await client.call("shop.strict", { count: 1.5 }).catch((error: Error) => error.message);
console.log(JSON.stringify([total, receipt.lines, moved, job.id, job.queueName, wrong]));
await client.close();

export function rejected(client: Client, receipt: Tasks["shop.checkout"]["result"]): void {
  // @ts-expect-error: there is no such task
  void client.add("shop.check", { order });
  // @ts-expect-error: an argument is missing
  void client.add("shop.checkout", {});
  // @ts-expect-error: an argument has another type
  void client.add("shop.loose", { count: "1" });
  // @ts-expect-error: an optional argument has another name
  void client.add("shop.loose", { count: 1, tag: [] });
  // @ts-expect-error: a field of a dataclass is missing
  void client.add("shop.checkout", { order: { id: "1", placed: "" } });
  // @ts-expect-error: it is not a member of the enum
  void client.add("shop.checkout", { order: { ...order, shipping: "fast" } });
  // @ts-expect-error: the result has another type
  const total: number = receipt.total;
  void total;
}
"""
CONFIG = {
    "compilerOptions": {
        "target": "es2022",
        "module": "nodenext",
        "strict": True,
        "exactOptionalPropertyTypes": True,
        "noUncheckedIndexedAccess": True,
        "noUnusedLocals": True,
        "verbatimModuleSyntax": True,
        "skipLibCheck": True,
        "types": ["node"],
    }
}


@pytest.fixture
def project(node_client: None, tmp_path: Path) -> Path:
    """A directory for TypeScript with two clients: in the second, an argument of a task has another name."""
    project = tmp_path / "project"
    for name, parameter in (("now", "person"), ("renamed", "name")):
        (project / name).mkdir(parents=True)
        (project / name / "shop.py").write_text(APP.format(parameters=f"{parameter}: str", first=parameter))
        (project / name / "program.ts").write_text(PROGRAM)
        command = [sys.executable, "-m", "bulltask", "gen-ts", "-A", "shop", "-o", "client.ts"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=project / name, env=environment, check=True)
    (project / "node_modules").symlink_to(HERE / "node_modules")
    (project / "package.json").write_text(json.dumps({"type": "module"}))
    (project / "tsconfig.json").write_text(json.dumps(CONFIG))
    return project


def test_node_calls_python_with_the_client_and_a_renamed_argument_is_a_compile_error(
    project: Path, harness: WorkerHarness
) -> None:
    compiled = subprocess.run(
        ["node", HERE / "node_modules/typescript/bin/tsc", "-p", "."],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in compiled.stdout.splitlines() if not line.startswith(" ")]
    assert len(errors) == 1, compiled.stdout
    assert errors[0].startswith("renamed/program.ts(")
    assert "'person' does not exist in type" in errors[0]

    source = (project / "now/shop.py").read_text().partition('app = App("shop")')[2]
    imports = "from tests.support.typed_tasks import register\n"
    harness.worker(imports + source, children=1, options=["-Q", "default"], environ={"PYTHONPATH": str(ROOT)})
    port = harness.url.rpartition(":")[2].partition("/")[0]
    run = subprocess.run(
        ["node", "now/program.js", port], cwd=project, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    total, lines, moved, job_id, queue, wrong = json.loads(run.stdout)
    assert (total, lines, queue) == ("5.00", ["2 tea"], "{mail}")
    assert moved == {"00000000-0000-0000-0000-000000000000": {"street": "Main 1", "postCode": "12345", "since": None}}
    assert wrong == "the job's data does not match task shop.strict: count: expected an integer, not 1.5"
    assert_like_a_job_of_python(harness, project / "now", job_id)


def assert_like_a_job_of_python(harness: WorkerHarness, directory: Path, job_id: str) -> None:
    """Compare the options of the client's job with those of a job that Python sent."""
    app = harness.sender()
    namespace = {"__name__": "shop", "app": app}
    source = (directory / "shop.py").read_text().partition("@app.task")
    exec(compile(source[1] + source[2], "shop.py", "exec"), namespace)
    own = app.send_task("greet", ("Ada",))
    keys = harness.keys_of("mail")
    nodes, pythons = (json.loads(harness.redis.hget(keys.job(id_), "opts")) for id_ in (job_id, own.id))  # type: ignore[arg-type]
    assert 0 <= pythons["bulltask"].pop("expires") - nodes["bulltask"].pop("expires") < 60_000
    assert nodes == pythons
