// bull-board for bulltask's queues: `node board.js`, or `node board.js '{mail}' '{reports}'` for selected queues.
//
//   REDIS_URL              the server; default: redis://127.0.0.1:6379
//   BULLMQ_PREFIX          bulltask's setting `prefix`; default: bull
//   HOST, PORT             the address to listen on; default: 127.0.0.1, 3000
//   BOARD_USER, BOARD_PASSWORD   the login; without a password it listens on 127.0.0.1 only
//   READ_ONLY=1            allows no changes
//   HISTORY_URL            the URL of `bulltask history serve`, for long-term charts; default: none

import { createHash, timingSafeEqual } from 'node:crypto';
import { createBullBoard } from '@bull-board/api';
import { BullMQAdapter } from '@bull-board/api/bullMQAdapter';
import { ExpressAdapter } from '@bull-board/express';
import { Queue } from 'bullmq';
import express from 'express';
import { LakeHistory } from './history.js';

const connection = { url: process.env.REDIS_URL ?? 'redis://127.0.0.1:6379' };
const prefix = process.env.BULLMQ_PREFIX ?? 'bull';
const host = process.env.HOST ?? '127.0.0.1';
const port = Number(process.env.PORT ?? 3000);
const user = process.env.BOARD_USER ?? 'admin';
const password = process.env.BOARD_PASSWORD ?? '';
const readOnlyMode = process.env.READ_ONLY === '1';
const historyProvider = process.env.HISTORY_URL ? new LakeHistory(process.env.HISTORY_URL) : undefined;
const SCAN_INTERVAL_MS = 10_000;

if (!password && host !== '127.0.0.1') {
  console.error(`Anyone who can open this dashboard can run, change and delete jobs. Set BOARD_PASSWORD to listen on ${host}.`);
  process.exit(2);
}

const serverAdapter = new ExpressAdapter();
const board = createBullBoard({ queues: [], serverAdapter, options: { historyProvider } });
const shown = new Map();

function show(name) {
  if (shown.has(name)) return;
  const queue = new Queue(name, { connection, prefix, skipMetasUpdate: true }); // so that displaying a queue does not create it
  queue.on('error', (error) => console.error(`${name}: ${error.message}`));
  shown.set(name, queue);
  board.addQueue(new BullMQAdapter(queue, { readOnlyMode }));
}

// Every queue has a key `{prefix}:{name}:meta`. The scan is repeated to find new queues.
async function showAll(client) {
  for await (const keys of client.scanStream({ match: `${prefix}:*:meta`, count: 1000 })) {
    for (const key of keys.sort()) show(key.slice(prefix.length + 1, -':meta'.length));
  }
}

const names = process.argv.slice(2);
names.forEach(show);
if (!names.length) {
  const finder = new Queue('bull-board', { connection, prefix, skipMetasUpdate: true });
  finder.on('error', (error) => console.error(error.message));
  shown.set('', finder);
  const scan = async () => showAll(await finder.client).catch((error) => console.error(error.message));
  await scan();
  setInterval(scan, SCAN_INTERVAL_MS).unref();
}

const hash = (text) => createHash('sha256').update(text).digest();
const expected = hash(`Basic ${Buffer.from(`${user}:${password}`).toString('base64')}`);

function checkAccess(request, response, next) {
  if (password && !timingSafeEqual(hash(request.headers.authorization ?? ''), expected)) {
    return response.status(401).set('WWW-Authenticate', 'Basic realm="bull-board"').send('Login required.');
  }
  // Protection against cross-site request forgery.
  if (request.method !== 'GET' && !['same-origin', undefined].includes(request.headers['sec-fetch-site'])) {
    return response.status(403).send('Cross-site requests are not allowed.');
  }
  next();
}

const server = express().use(checkAccess, serverAdapter.getRouter()).listen(port, host, (error) => {
  if (error) throw error;
  console.log(`bull-board: http://${host}:${server.address().port}/`);
});

for (const signal of ['SIGINT', 'SIGTERM']) {
  process.once(signal, async () => {
    server.close();
    server.closeAllConnections();
    await Promise.all([...shown.values()].map((queue) => queue.close()));
    process.exit(0);
  });
}
