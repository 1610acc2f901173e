// The processors of the bridge's workers. Each entry receives the arguments of "worker.start" and returns a processor.

import { appendFileSync } from 'node:fs';
import { appendFile } from 'node:fs/promises';
import { setTimeout as sleep } from 'node:timers/promises';
import { Queue, RateLimitError, UnrecoverableError, WaitingChildrenError } from './client.js';

const gates = new Map(); // name → { opened: a promise, open: a function }

// Returns a gate, which the first call creates; once opened, it stays open.
export function gateOf(name) {
  if (!gates.has(name)) {
    const gate = {};
    gate.opened = new Promise(resolve => (gate.open = resolve));
    gates.set(name, gate);
  }
  return gates.get(name);
}

export const PROCESSORS = {
  // Returns the job's data.
  echo: () => async job => job.data,

  // Throws; with `unrecoverable` the job is not retried.
  fail: ({ message = 'it failed', unrecoverable = false }) => async () => {
    throw unrecoverable ? new UnrecoverableError(message) : new Error(message);
  },

  // Throws in jobs called "fail", returns the data of others.
  'fail-named': () => async job => {
    if (job.name === 'fail') throw new Error('it failed');
    return job.data;
  },

  // Throws in the first `n` attempts, then returns their number.
  'fail-n': ({ n }) => async job => {
    if (job.attemptsMade < n) throw new Error(`attempt ${job.attemptsMade + 1} failed`);
    return job.attemptsMade;
  },

  // Removes the unprocessed children; returns the values of the others and the failures of ignored ones.
  gather: () => async job => {
    await job.removeUnprocessedChildren();
    return { values: await job.getChildrenValues(), ignored: await job.getIgnoredChildrenFailures() };
  },

  // Adds children in `queue` in its first run, waits for them, and then returns their values, sorted.
  expand: ({ queue, connection }) => async (job, token) => {
    if (!job.data.step) {
      const children = new Queue(queue, { connection });
      const parent = { id: job.id, queue: job.queueQualifiedName };
      await children.addBulk([1, 2, 3].map(n => ({ name: 'ok', data: { n }, opts: { parent, delay: 300 } })));
      await children.close();
      await job.updateData({ step: 1 });
      if (await job.moveToWaitingChildren(token)) throw new WaitingChildrenError();
    }
    const inOrder = (a, b) => (JSON.stringify(a) < JSON.stringify(b) ? -1 : 1);
    return Object.values(await job.getChildrenValues()).sort(inOrder);
  },

  // Reports each of `steps` as progress, and as a line of the job's log; then continues for `then_ms` milliseconds.
  progress: ({ steps = [50, 100], then_ms = 0 }) => async job => {
    for (const step of steps) {
      await job.updateProgress(step);
      await job.log(`progress ${JSON.stringify(step)}`);
    }
    if (then_ms) await sleep(then_ms, null, { ref: false });
    return steps.length;
  },

  // Takes `ms` milliseconds.
  sleep: ({ ms }) => async () => {
    await sleep(ms);
    return ms;
  },

  // Rate-limits the queue for `ms` milliseconds when a job first runs; returns the job's data when it runs again.
  busy: ({ ms, connection }) => async job => {
    if (job.attemptsStarted > 1) return job.data;
    const queue = new Queue(job.queueName, { connection });
    await queue.rateLimit(ms);
    await queue.close();
    throw new RateLimitError();
  },

  // Waits until "gate.open" is called with this gate.
  hold: ({ gate }) => () => gateOf(gate).opened,

  // Appends "<job id> <process id>" to `file`; one write in append mode, so lines of several processes do not mix.
  record: ({ file }) => async job => {
    await appendFile(file, `${job.id} ${process.pid}\n`);
    return process.pid;
  },

  // Takes the `ms` of the job's data; before and after that, appends "start" or "end <job id> <process id> <epoch ms>" to `file`.
  attempt: ({ file }) => async job => {
    const note = what => appendFileSync(file, `${what} ${job.id} ${process.pid} ${Date.now()}\n`);
    note('start');
    await sleep(job.data.ms);
    note('end');
    return job.data.ms;
  },
};
