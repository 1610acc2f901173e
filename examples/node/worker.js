// Runs jobs that a Python program sends.
import { Worker } from 'bullmq';

const connection = { url: process.env.REDIS_URL ?? 'redis://127.0.0.1:6379' };

const worker = new Worker(
  '{thumbnails}', // Python's queue "thumbnails"
  async (job) => {
    const { image, width } = job.data;
    if (width < 1) {
      throw new Error(`a width of ${width} is too small`);
    }
    await job.updateProgress(50);
    return { file: image.replace(/\.jpg$/, `-${width}.jpg`), by: 'Node' };
  },
  { connection, concurrency: 5 },
);

worker.on('completed', (job, result) => console.log(`${job.name} ${job.id}: ${result.file}`));
worker.on('failed', (job, error) => console.log(`${job.name} ${job.id} failed: ${error.message}`));
await worker.waitUntilReady();
console.log('waiting for jobs; press Ctrl-C to stop');

for (const signal of ['SIGINT', 'SIGTERM']) {
  process.once(signal, () => worker.close());
}
