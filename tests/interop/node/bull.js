// Runs Bull, BullMQ's predecessor, on commands from stdin, with results on stdout, for tests of the
// migration (see bull_bridge.py).
//
// The protocol is that of bridge.js; the first argument is the package: bull or bull-3.

import process from 'node:process';
import { createInterface } from 'node:readline';

const { default: Bull } = await import(process.argv[2]);

console.log = console.info = console.error; // only replies may appear on stdout

const write = message => process.stdout.write(`${JSON.stringify(message)}\n`);
const queues = [];

function open({ queue, prefix, connection, options = {} }) {
  const opened = new Bull(queue, { prefix, redis: connection, ...options });
  opened.on('error', error => console.error(error.message));
  queues.push(opened);
  return opened;
}

async function shut(queue, doNotWait = false) {
  queues.splice(queues.indexOf(queue), 1);
  await queue.close(doNotWait);
}

// Processes a job as its data require.
async function work(job) {
  const { fail, log, progress, value } = job.data;
  if (log) await job.log(log);
  if (progress !== undefined) await job.progress(progress);
  if (fail) throw new Error(fail);
  return value;
}

const OPERATIONS = {
  // Calls methods of one queue in order: [[method, ...arguments], …]; returns ids of jobs, or other plain replies.
  'queue.calls': async at => {
    const queue = open(at);
    const replies = [];
    for (const [method, ...args] of at.calls) {
      const reply = await queue[method](...args);
      replies.push(Array.isArray(reply) ? reply.map(job => job.id ?? job) : reply?.id ?? reply ?? null);
    }
    await shut(queue);
    return replies;
  },
  // Runs a worker until a number of attempts have ended.
  'queue.work': async at => {
    const queue = open(at);
    let ended = 0;
    const done = new Promise(resolve => {
      const count = () => ++ended === at.attempts && resolve();
      queue.on('completed', count);
      queue.on('failed', count);
    });
    queue.process('*', work).catch(() => {});
    await done;
    await shut(queue);
  },
  // Starts a worker that acquires one job and keeps it; replies when the worker has it.
  'queue.hold': at => {
    const queue = open(at);
    return new Promise(resolve => {
      queue.process('*', job => {
        resolve(job.id);
        return new Promise(() => {});
      });
    });
  },
};

createInterface({ input: process.stdin })
  .on('line', async line => {
    const { id, op, ...fields } = JSON.parse(line);
    try {
      write({ id, ok: (await OPERATIONS[op](fields)) ?? null });
    } catch (error) {
      write({ id, error: error.message });
    }
  })
  .on('close', () => process.exit(0));
