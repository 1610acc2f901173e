// Sends a job in the trace of a web request, runs the job that a bulltask worker sends back, and prints the spans of
// this process, one JSON object per line.
//
//   argv  host, port and database of Redis; the queue to send to; the queue to work on

import { context, propagation, trace } from '@opentelemetry/api';
import { AsyncLocalStorageContextManager } from '@opentelemetry/context-async-hooks';
import { W3CTraceContextPropagator } from '@opentelemetry/core';
import { BasicTracerProvider, InMemorySpanExporter, SimpleSpanProcessor } from '@opentelemetry/sdk-trace-base';
import { Queue, Worker } from 'bullmq';
import { BullMQOtel } from 'bullmq-otel-1';
import process from 'node:process';

const [host, port, db, there, back] = process.argv.slice(2);
const exporter = new InMemorySpanExporter();
const provider = new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] });
trace.setGlobalTracerProvider(provider);
context.setGlobalContextManager(new AsyncLocalStorageContextManager().enable());
propagation.setGlobalPropagator(new W3CTraceContextPropagator());

const options = { connection: { host, port: Number(port), db: Number(db) }, telemetry: new BullMQOtel('node') };
const queue = new Queue(there, options);
const worker = new Worker(back, async job => job.data, options);
const ran = new Promise(resolve => worker.once('completed', resolve));

await trace.getTracer('web').startActiveSpan('web', async span => {
  await queue.add('ping', { text: 'hello' });
  span.end();
});
await ran;
await worker.close();
await queue.close();
await provider.forceFlush();
for (const span of exporter.getFinishedSpans()) {
  const { name, kind, attributes, parentSpanContext } = span;
  const { traceId, spanId } = span.spanContext();
  console.log(JSON.stringify({ name, kind, attributes, traceId, spanId, parentId: parentSpanContext?.spanId ?? null }));
}
