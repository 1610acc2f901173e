// Bull, BullMQ's predecessor, behind stdin and stdout, for tests of the migration (see bull_bridge.py).
//
// The same lines as those of bridge.js; the first argument names the package: bull, or bull-3.

import process from 'node:process';
import { createInterface } from 'node:readline';

const { default: Bull } = await import(process.argv[2]);

console.log = console.info = console.error; // only answers may appear on stdout

const write = message => process.stdout.write(`${JSON.stringify(message)}\n`);
const queues = [];

function open({ queue, prefix, connection, options = {} }) {
  const made = new Bull(queue, { prefix, redis: connection, ...options });
  made.on('error', error => console.error(error.message));
  queues.push(made);
  return made;
}

async function shut(queue, doNotWait = false) {
  queues.splice(queues.indexOf(queue), 1);
  await queue.close(doNotWait);
}

// What a job's data tell it to do.
async function work(job) {
  const { fail, log, progress, value } = job.data;
  if (log) await job.log(log);
  if (progress !== undefined) await job.progress(progress);
  if (fail) throw new Error(fail);
  return value;
}

const OPERATIONS = {
  // Calls of methods of one queue, in order: [[method, ...arguments], …]; the ids of jobs, or other plain answers.
  'queue.calls': async at => {
    const queue = open(at);
    const answers = [];
    for (const [method, ...args] of at.calls) {
      const answer = await queue[method](...args);
      answers.push(Array.isArray(answer) ? answer.map(job => job.id ?? job) : answer?.id ?? answer ?? null);
    }
    await shut(queue);
    return answers;
  },
  // Works on jobs until so many attempts have ended.
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
  // A worker that takes one job and keeps it; the answer comes when it has it.
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
