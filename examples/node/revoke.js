// Revokes a job: a job that is waiting, including for its next attempt, fails within a second; a job that is running in
// a bulltask worker is cancelled. Its failedReason is "revoked", and it is not retried.
//
//   import { revoke } from './revoke.js';
//   await revoke(queue, job.id);
//
// The request is stored in a Redis key of bulltask, which the queue's workers read once a second.
export async function revoke(queue, jobId) {
  const client = await queue.client;
  const { prefix = 'bull' } = queue.opts;
  const keyPrefix = prefix === 'bull' ? `bulltask:${queue.name}:` : `bulltask:${prefix}:${queue.name}:`;
  await client.zadd(`${keyPrefix}revoked`, Date.now(), jobId);
}
