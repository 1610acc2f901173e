// Has bulltask end a job: one that waits, or waits for its next try, fails within a second; one that a bulltask worker
// runs is interrupted. Its failedReason is "revoked", and it is not retried.
//
//   import { revoke } from './revoke.js';
//   await revoke(queue, job.id);
//
// The wish stands in Redis, outside of BullMQ's keys, and the queue's bulltask workers look for it once a second.
export async function revoke(queue, jobId) {
  const client = await queue.client;
  const { prefix = 'bull' } = queue.opts;
  const own = prefix === 'bull' ? `bulltask:${queue.name}:` : `bulltask:${prefix}:${queue.name}:`;
  await client.zadd(`${own}revoked`, Date.now(), jobId);
}
