"""Node.js and bulltask share queues in a Redis Cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bulltask import App
from tests.interop.conftest import HERE
from tests.support.redis_cluster import Cluster
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]

TASK = """
@app.task(name="double")
def double(x: int) -> int:
    return 2 * x
"""

PROGRAM = """
const { Cluster } = require('ioredis');
const { Queue, Worker } = require('bullmq');

const nodes = [{ host: '127.0.0.1', port: Number(process.argv[2]) }];
const connect = () => ({ connection: new Cluster(nodes, { redisOptions: { maxRetriesPerRequest: null } }) });

async function main() {
  new Worker('{node}', async job => job.data.x * 2, connect());
  const queue = new Queue('{python}', connect());
  const { id } = await queue.add('double', { x: 21 });
  // Not with QueueEvents: a job that finishes while they connect is missed.
  while (!(await queue.getJob(id)).finishedOn) await new Promise(resolve => setTimeout(resolve, 20));
  console.log(JSON.stringify((await queue.getJob(id)).returnvalue));
}

main();
"""


def test_node_and_bulltask_run_each_others_jobs_in_a_cluster(cluster: Cluster, single_url: str, tmp_path: Path) -> None:
    settings = {"broker_url": cluster.broker_url, "worker_concurrency": 1}
    environ, options = {"JOURNAL_URL": single_url}, ["-Q", "python"]
    worker = Worker(tmp_path / "worker", TASK, settings=settings, environ=environ, options=options)
    program = tmp_path / "program.cjs"
    program.write_text(PROGRAM)
    command = [shutil.which("node") or "node", str(program), str(cluster.servers[0].port)]
    environment = {**os.environ, "NODE_PATH": str(HERE / "node_modules")}
    app = App("sender", cluster.broker_url)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            assert json.loads(node.stdout.readline()) == 42
            assert app.send_task("double", kwargs={"x": 4}, queue="node").get(timeout=30) == 8
        finally:
            node.kill()
            worker.close()
            app.close()
