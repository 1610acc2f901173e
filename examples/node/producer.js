// Sends jobs to a Python worker and waits for their results.
import { Queue, QueueEvents } from 'bullmq';

const connection = { url: process.env.REDIS_URL ?? 'redis://127.0.0.1:6379' };

// Python's queue "mail" is "{mail}" in Node.js: the hash tag keeps its keys together on a Redis Cluster.
const queue = new Queue('{mail}', { connection });
const events = new QueueEvents('{mail}', { connection });
await events.waitUntilReady();

// The job's name is the task's name, and its data contains the arguments by name.
const job = await queue.add('mail.send', { to: 'ada@example.com', subject: 'Hello from Node' });
console.log(`sent job ${job.id}`);
console.log('result from Python:', await job.waitUntilFinished(events, 30_000));

// An exception in Python is thrown in Node.js.
const bad = await queue.add('mail.send', { to: 'nobody', subject: 'Hello' });
try {
  await bad.waitUntilFinished(events, 30_000);
} catch (error) {
  console.log('error from Python:', error.message);
}

await events.close();
await queue.close();
