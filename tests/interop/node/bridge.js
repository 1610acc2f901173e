// Runs the official Node client of BullMQ on commands from stdin, with results on stdout, for tests in Python
// (see node_bridge.py).
//
//   argv  the npm package of the client, "bullmq" by default
//   in    {"id": 1, "op": "queue.add", "queue": "mail", "name": "send", "data": {}}   one JSON object per line
//   out   {"id": 1, "ok": {...}}  or  {"id": 1, "error": "the message"}               in order of completion
//   out   {"event": "completed", "args": {...}, ...}                                  at any time
//
// Every operation may carry "connection" ({host, port, db, password}) and "prefix" (default "bull"). The process exits
// after "exit" or when stdin is closed, so it cannot outlive the test that started it.

import { createInterface } from 'node:readline';
import { Bridge } from './operations.js';

const EXIT_AFTER_MS = 2_000; // closing waits for Redis, which a test may have killed

// Only replies and events may appear on stdout.
console.log = console.info = console.error;

const write = message => process.stdout.write(`${JSON.stringify(message)}\n`);
const textOf = error => (error instanceof Error ? error.message || error.name : String(error));

const bridge = new Bridge((event, args, more = {}) => write({ event, args, ...more }));

process.on('unhandledRejection', reason => write({ event: 'bridge.unhandledRejection', args: { message: textOf(reason) } }));

async function answer(line) {
  const { id, op, ...fields } = JSON.parse(line);
  try {
    write({ id, ok: (await bridge.run(op, fields)) ?? null });
  } catch (error) {
    write({ id, error: textOf(error) });
  }
  return op;
}

let exiting = false;

async function exit() {
  if (exiting) return;
  exiting = true;
  setTimeout(() => process.exit(1), EXIT_AFTER_MS).unref();
  await bridge.close();
  process.exit(0);
}

createInterface({ input: process.stdin })
  .on('line', async line => {
    if ((await answer(line)) === 'exit') await exit();
  })
  .on('close', exit);
