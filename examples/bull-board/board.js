// bull-board over the queues of bulltask: `node board.js`, or `node board.js '{mail}' '{reports}'` for these alone.
//
//   REDIS_URL              the server; redis://127.0.0.1:6379 if not set
//   BULLMQ_PREFIX          bulltask's setting `prefix`; bull if not set
//   HOST, PORT             where it listens; 127.0.0.1, 3000
//   BOARD_USER, BOARD_PASSWORD   who may come in; without a password it listens on 127.0.0.1 only
//   READ_ONLY=1            it shows everything and changes nothing
//   HISTORY_URL            where `bulltask job serve` listens, for charts over months; none if not set

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
const LOOK_EVERY_MS = 10_000;

if (!password && host !== '127.0.0.1') {
  console.error(`Whoever can open this board can run, change and delete jobs. Set BOARD_PASSWORD to listen on ${host}.`);
  process.exit(2);
}

const serverAdapter = new ExpressAdapter();
const board = createBullBoard({ queues: [], serverAdapter, options: { historyProvider } });
const shown = new Map();

function show(name) {
  if (shown.has(name)) return;
  const queue = new Queue(name, { connection, prefix, skipMetasUpdate: true }); // looking at a queue makes none
  queue.on('error', (error) => console.error(`${name}: ${error.message}`));
  shown.set(name, queue);
  board.addQueue(new BullMQAdapter(queue, { readOnlyMode }));
}

// Every queue has a key `{prefix}:{name}:meta`, so those that come later are found too.
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
  const look = async () => showAll(await finder.client).catch((error) => console.error(error.message));
  await look();
  setInterval(look, LOOK_EVERY_MS).unref();
}

const hash = (text) => createHash('sha256').update(text).digest();
const expected = hash(`Basic ${Buffer.from(`${user}:${password}`).toString('base64')}`);

function letIn(request, response, next) {
  if (password && !timingSafeEqual(hash(request.headers.authorization ?? ''), expected)) {
    return response.status(401).set('WWW-Authenticate', 'Basic realm="bull-board"').send('Who are you?');
  }
  // A page of somebody else, open in the same browser, must not press buttons here.
  if (request.method !== 'GET' && !['same-origin', undefined].includes(request.headers['sec-fetch-site'])) {
    return response.status(403).send('This came from another site.');
  }
  next();
}

const server = express().use(letIn, serverAdapter.getRouter()).listen(port, host, (error) => {
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
