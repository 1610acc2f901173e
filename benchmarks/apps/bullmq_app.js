// The BullMQ app for Node.js, with default settings except the concurrency; `benchmarks/frameworks.py` has the commands.
//
//   node bullmq_app.js worker PROCESSES CONCURRENCY
//   node bullmq_app.js single|bulk|latency JOBS      prints one line of JSON, as apps/produce.py does
//   node bullmq_app.js busy LOOPS JOBS               as apps/body.py does
'use strict';

const { fork } = require('child_process');
const { randomUUID } = require('crypto');
const fs = require('fs');
const path = require('path');

// BENCH_BULLMQ: the directory of another version, from tests/interop/package.json
const bullmq = path.join(__dirname, '../../tests/interop/node_modules', process.env.BENCH_BULLMQ ?? 'bullmq');
const { Queue, QueueEvents, Worker } = require(bullmq);

const BULK = 1000;
const SLEEP_MS = 50;
const WARM_UP = 20;
const PAUSE_MS = 3;
const FLUSH_MS = 1;
const HEADER_BYTES = 24;

// BENCH_JOB_OPTIONS: options of every job, as JSON; the jobs then also have UUIDs as ids
const jobOptions = process.env.BENCH_JOB_OPTIONS && JSON.parse(process.env.BENCH_JOB_OPTIONS);
const options = () => jobOptions && { ...jobOptions, jobId: randomUUID() };

const { hostname, port } = new URL(process.env.BENCH_BROKER);
const connection = { host: hostname, port: Number(port), maxRetriesPerRequest: null };
const seconds = since => Number(process.hrtime.bigint() - since) / 1e9;
const pause = ms => new Promise(resolve => setTimeout(resolve, ms));

const [kind, loops] = (process.env.BENCH_BODY ?? 'noop').split(':');

// The bodies of apps/body.py.
function burn(loops) {
  let number = 0;
  for (let step = 0; step < loops; step += 1) number = (number + step * step) % 65536;
  return number;
}

async function body() {
  if (kind === 'busy') burn(Number(loops));
  if (kind === 'sleep') await pause(SLEEP_MS);
}

// The file of apps/counter.py. Node.js has no memory-mapped files, and a system call for each job would slow down only
// this framework, so the counts are written at most once per millisecond.
class Counter {
  constructor() {
    const jobs = Number(process.env.BENCH_JOBS);
    this.memory = Buffer.alloc(HEADER_BYTES + jobs);
    this.memory.writeBigInt64LE(process.hrtime.bigint(), 0);
    this.file = fs.openSync(path.join(process.env.BENCH_COUNTERS, String(process.pid)), 'w');
    this.done = 0;
    this.dirty = false;
  }

  add(index) {
    this.memory[HEADER_BYTES + index] = Math.min(this.memory[HEADER_BYTES + index] + 1, 255);
    this.done += 1;
    this.memory.writeBigInt64LE(process.hrtime.bigint(), 8);
    if (!this.dirty) {
      this.dirty = true;
      setTimeout(() => this.flush(), FLUSH_MS);
    }
  }

  flush() {
    this.dirty = false;
    this.memory.writeBigInt64LE(BigInt(this.done), 16);
    fs.writeSync(this.file, this.memory, 0, this.memory.length, 0);
  }
}

function work(concurrency) {
  let counter;
  const noop = async job => {
    counter ??= new Counter();
    if (kind !== 'noop') await body();
    counter.add(job.data.index);
    return job.data.index;
  };
  const worker = new Worker('default', noop, { connection, concurrency });
  process.on('SIGTERM', async () => {
    await worker.close();
    counter?.flush();
    process.exit(0);
  });
  process.on('disconnect', () => process.exit(1)); // the parent has exited
}

function workInProcesses(processes, concurrency) {
  const children = Array.from({ length: processes }, () => fork(__filename, ['child', String(concurrency)]));
  process.on('SIGTERM', () => {
    children.forEach(child => child.kill('SIGTERM'));
  });
  let running = children.length;
  children.forEach(child =>
    child.on('exit', code => {
      running -= 1;
      if (running === 0 || code) process.exit(code ?? 1);
    }),
  );
}

async function single(queue, jobs) {
  for (let index = 0; index < WARM_UP; index += 1) await queue.add('noop', { index }, options());
  const started = process.hrtime.bigint();
  for (let index = 0; index < jobs; index += 1) await queue.add('noop', { index }, options());
  return { seconds: seconds(started), sent: jobs + WARM_UP };
}

async function bulk(queue, jobs) {
  const started = process.hrtime.bigint();
  for (let first = 0; first < jobs; first += BULK) {
    const length = Math.min(BULK, jobs - first);
    await queue.addBulk(Array.from({ length }, (_, at) => ({ name: 'noop', data: { index: first + at }, opts: options() })));
  }
  return { seconds: seconds(started), sent: jobs };
}

function lastEndNs() {
  const directory = process.env.BENCH_COUNTERS;
  const ends = fs.readdirSync(directory).map(name => {
    const header = Buffer.alloc(HEADER_BYTES);
    const file = fs.openSync(path.join(directory, name), 'r');
    fs.readSync(file, header, 0, HEADER_BYTES, 0);
    fs.closeSync(file);
    return header.readBigInt64LE(8);
  });
  return ends.reduce((last, end) => (end > last ? end : last), 0n);
}

async function latency(queue, jobs) {
  const events = new QueueEvents('default', { connection });
  await events.waitUntilReady();
  const results = [];
  const taskEnds = [];
  for (let index = -Math.min(WARM_UP, jobs); index < jobs; index += 1) {
    const started = process.hrtime.bigint();
    const job = await queue.add('noop', { index: Math.max(0, index) }, options());
    await job.waitUntilFinished(events, 20000);
    const received = process.hrtime.bigint();
    await pause(PAUSE_MS);
    if (index >= 0) {
      results.push(Number(received - started) / 1e9);
      taskEnds.push(Number(lastEndNs() - started) / 1e9);
    }
  }
  return { results, task_ends: taskEnds };
}

function busy(loops, jobs) {
  burn(loops);
  const started = process.hrtime.bigint();
  for (let index = 0; index < jobs; index += 1) burn(loops);
  console.log(seconds(started));
}

async function produce(operation, jobs) {
  const queue = new Queue('default', { connection });
  await queue.waitUntilReady();
  console.log(JSON.stringify(await operation(queue, jobs)));
  process.exit(0);
}

const [operation, ...numbers] = process.argv.slice(2);
if (operation === 'worker') workInProcesses(...numbers.map(Number));
else if (operation === 'child') work(Number(numbers[0]));
else if (operation === 'busy') busy(...numbers.map(Number));
else produce({ single, bulk, latency }[operation], Number(numbers[0]));
