// Runs bull-board for the queues of a test (see board.py): its HTTP API on a free port, on loopback only.
//
//   argv   {"connection": {host, port, db}, "prefix": "bull", "queues": [{"name": "{mail}", …options of the adapter}],
//           "history": "http://127.0.0.1:3001/" of `bulltask history serve`, or null}
//   out    {"port": 45123}   once it listens
//
// The process exits when stdin is closed, so it cannot outlive the test that started it.

import { createBullBoard } from '@bull-board/api';
import { BullMQAdapter } from '@bull-board/api/bullMQAdapter';
import { ExpressAdapter } from '@bull-board/express';
import { Queue } from 'bullmq';
import express from 'express';
import { LakeHistory } from '../../../examples/bull-board/history.js';

const EXIT_AFTER_MS = 2_000; // closing waits for Redis, which a test may have killed

const { connection, prefix, queues, history } = JSON.parse(process.argv[2]);

const adapters = queues.map(({ name, ...options }) => {
  const queue = new Queue(name, { connection, prefix });
  queue.on('error', error => console.error(error.message));
  return new BullMQAdapter(queue, options);
});

const serverAdapter = new ExpressAdapter();
createBullBoard({
  queues: adapters,
  serverAdapter,
  options: {
    validateResponses: true, // a response that does not match the board's schemas becomes a 500 error
    historyProvider: history ? new LakeHistory(history) : undefined,
  },
});

const server = express().use(serverAdapter.getRouter()).listen(0, '127.0.0.1', () => {
  process.stdout.write(`${JSON.stringify({ port: server.address().port })}\n`);
});

process.stdin.resume().on('close', async () => {
  setTimeout(() => process.exit(1), EXIT_AFTER_MS).unref();
  server.closeAllConnections();
  await Promise.all(adapters.map(adapter => adapter.queue.close()));
  process.exit(0);
});
