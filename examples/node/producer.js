// Sends jobs to a worker that is written in Python, and waits for their results.
import { Queue, QueueEvents } from 'bullmq';

const connection = { url: process.env.REDIS_URL ?? 'redis://127.0.0.1:6379' };

// Python's queue "mail" is "{mail}" here: the braces keep its keys together on a Redis Cluster.
const queue = new Queue('{mail}', { connection });
const events = new QueueEvents('{mail}', { connection });
await events.waitUntilReady();

// The job's name is the task's name, its data are the arguments by their names.
const job = await queue.add('mail.send', { to: 'ada@example.com', subject: 'Hello from Node' });
console.log(`sent job ${job.id}`);
console.log('Python answered', await job.waitUntilFinished(events, 30_000));

// An error in Python is an error here.
const bad = await queue.add('mail.send', { to: 'nobody', subject: 'Hello' });
try {
  await bad.waitUntilFinished(events, 30_000);
} catch (error) {
  console.log('Python raised:', error.message);
}

await events.close();
await queue.close();
