// The official client that this process drives: the npm package that its first argument names.

import process from 'node:process';

export const {
  FlowProducer, Queue, QueueEvents, RateLimitError, UnrecoverableError, WaitingChildrenError, Worker,
} = await import(process.argv[2] ?? 'bullmq');
