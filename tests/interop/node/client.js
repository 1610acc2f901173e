// The official client: the npm package that the first argument names.

import process from 'node:process';

export const {
  FlowProducer, Queue, QueueEvents, RateLimitError, UnrecoverableError, WaitingChildrenError, Worker,
} = await import(process.argv[2] ?? 'bullmq');
