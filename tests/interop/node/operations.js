// The operations of the bridge: one line of BullMQ each, where possible.

import cronParser from 'cron-parser';
import { FlowProducer, Queue, QueueEvents, Worker } from './client.js';
import { revoke } from '../../../examples/node/revoke.js';
import { gateOf, PROCESSORS } from './processors.js';
import { runSequence } from './sequence.js';

const FIELDS = [
  'id', 'name', 'data', 'opts', 'progress', 'returnvalue', 'failedReason', 'stacktrace', 'attemptsMade',
  'attemptsStarted', 'stalledCounter', 'timestamp', 'processedOn', 'finishedOn', 'delay', 'priority', 'parentKey',
  'queueName',
];

const fieldsOf = job => Object.fromEntries(FIELDS.map(field => [field, job[field] ?? null]));

const treeOf = ({ job, children = [] }) => ({ ...fieldsOf(job), children: children.map(treeOf) });

// Converts results to JSON: jobs become their fields, alone and in lists.
function plain(value) {
  if (Array.isArray(value)) return value.map(plain);
  return value && typeof value === 'object' && 'queueName' in value && 'attemptsMade' in value ? fieldsOf(value) : value;
}

const OPERATIONS = {
  'queue.add': async (bridge, { name, data, opts, ...at }) => fieldsOf(await bridge.queue(at).add(name, data, opts)),
  'queue.addBulk': async (bridge, { jobs, ...at }) => (await bridge.queue(at).addBulk(jobs)).map(fieldsOf),
  'queue.getJobCounts': (bridge, { states = [], ...at }) => bridge.queue(at).getJobCounts(...states),
  'queue.getWorkers': (bridge, at) => bridge.queue(at).getWorkers(),
  'queue.pause': (bridge, at) => bridge.queue(at).pause(),
  'queue.resume': (bridge, at) => bridge.queue(at).resume(),
  'queue.drain': (bridge, { delayed = false, ...at }) => bridge.queue(at).drain(delayed),
  'queue.obliterate': (bridge, { force = false, ...at }) => bridge.queue(at).obliterate({ force }),
  // Any other method of a queue or a job, with a list of arguments.
  'queue.call': async (bridge, { method, args = [], ...at }) => plain(await bridge.queue(at)[method](...args)),
  'job.call': async (bridge, { job, method, args = [], ...at }) => plain(await (await bridge.job(job, at))[method](...args)),

  // Revokes a job as a Node program does.
  'job.revoke': (bridge, { job, ...at }) => revoke(bridge.queue(at), job),

  // Everything about one job; null if it does not exist.
  'queue.getJob': async (bridge, { job: id, ...at }) => {
    const queue = bridge.queue(at);
    const job = await queue.getJob(id);
    if (!job) return null;
    const [state, { logs }] = await Promise.all([job.getState(), queue.getJobLogs(id)]);
    return { ...fieldsOf(job), state, logs };
  },

  'job.waitUntilFinished': async (bridge, { job, ttl = 50_000, ...at }) =>
    (await bridge.job(job, at)).waitUntilFinished(await bridge.waiter(at), ttl),

  'flow.add': async (bridge, { flow, ...at }) => treeOf(await bridge.flows(at).add(flow)),
  'flow.addBulk': async (bridge, { flows, ...at }) => (await bridge.flows(at).addBulk(flows)).map(treeOf),
  'flow.get': async (bridge, { queue, job, opts = {}, ...at }) =>
    treeOf(await bridge.flows(at).getFlow({ queueName: queue, id: job, prefix: at.prefix, ...opts })),

  'worker.start': async (bridge, { queue, connection, prefix, processor, args = {}, opts = {}, ...more }) => {
    if (!(processor in PROCESSORS)) throw new Error(`no processor "${processor}": ${Object.keys(PROCESSORS).join(', ')}`);
    const worker = new Worker(queue, PROCESSORS[processor](args), { connection, prefix, ...more, ...opts });
    worker.on('error', error => bridge.emit('worker.error', { message: error.message }, { queue }));
    await worker.waitUntilReady();
    return bridge.keep(worker);
  },
  'gate.open': (_, { gate }) => gateOf(gate).open(null),
  'worker.close': (bridge, { worker, force = false }) => bridge.release(worker, force),

  // Pushes every event that is added to the stream after this reply (or after the stream id `after`).
  'events.start': async (bridge, { queue, connection, prefix, after }) => {
    const lastEventId = after ?? (await bridge.lastEventId({ queue, connection, prefix }));
    const events = new Tap(queue, { connection, prefix, lastEventId }, bridge.emit);
    events.on('error', error => bridge.emit('events.error', { message: error.message }, { queue }));
    await events.waitUntilReady();
    return bridge.keep(events);
  },
  'events.close': (bridge, { events }) => bridge.release(events),

  // Runs steps of the differential tests (sequence.js); returns outcomes, job ids and called scripts.
  'sequence.run': (bridge, fields) => runSequence(fields),

  // When each [pattern, time zone, epoch ms] fires next: epoch ms, null for never, or "invalid".
  'cron.next': (bridge, { cases }) => cases.map(nextOf),

  reset: bridge => bridge.close(), // closes everything, so that Node need not be restarted
  exit: () => null, // bridge.js does the rest
};

function nextOf([pattern, tz, after]) {
  let expression;
  try {
    expression = cronParser.parseExpression(pattern, { tz, currentDate: new Date(after) });
  } catch {
    return 'invalid';
  }
  try {
    return expression.next().getTime();
  } catch {
    return null;
  }
}

// QueueEvents that passes on all events, whatever their names.
class Tap extends QueueEvents {
  constructor(name, opts, pass) {
    super(name, { ...opts, autorun: false });
    this.pass = pass;
    this.run().catch(error => this.emit('error', error));
  }

  emit(event, ...args) {
    const [first, id] = event === 'drained' ? [{}, args[0]] : args;
    const repeats = event.endsWith(`:${first?.jobId}`); // "completed:<id>" comes after "completed"
    if (!repeats && event !== 'error' && event !== 'ioredis:close') {
      this.pass(event, first, { queue: this.name, stream: id });
    }
    return super.emit(event, ...args);
  }
}

export class Bridge {
  #kept = new Map(); // handle → worker or events
  #shared = new Map(); // kind, queue, prefix and connection → queue, flow producer or events to wait with

  constructor(emit) {
    this.emit = emit;
  }

  async run(op, fields) {
    if (!Object.hasOwn(OPERATIONS, op)) throw new Error(`no operation "${op}": ${Object.keys(OPERATIONS).join(', ')}`);
    return OPERATIONS[op](this, { prefix: 'bull', ...fields });
  }

  queue = at => this.#share('queue', at, ({ queue, ...opts }) => new Queue(queue, opts));
  flows = at => this.#share('flows', at, opts => new FlowProducer(opts));

  async job(id, at) {
    const job = await this.queue(at).getJob(id);
    if (!job) throw new Error(`no job ${id} in queue ${at.queue}`);
    return job;
  }

  // Reads from the newest event on. The default, "events after the first read", misses events just before that read.
  async waiter(at) {
    const lastEventId = await this.lastEventId(at);
    return this.#share('waiter', at, ({ queue, ...opts }) => new QueueEvents(queue, { ...opts, lastEventId }));
  }

  async lastEventId(at) {
    const queue = this.queue(at);
    const client = await (queue.client ?? queue.getBackend().client); // 6.x stores its connection in another property
    const newest = await client.xrevrange(queue.toKey('events'), '+', '-', 'COUNT', 1);
    return newest.length ? newest[0][0] : '0-0';
  }

  keep(resource) {
    const handle = `${resource.constructor.name}-${this.#kept.size + 1}`;
    this.#kept.set(handle, resource);
    return handle;
  }

  async release(handle, ...args) {
    if (!this.#kept.has(handle)) throw new Error(`no worker or listener "${handle}"`);
    await this.#kept.get(handle).close(...args);
  }

  // Workers first and by force: a test that ends early must not wait for its jobs.
  async close() {
    const failed = error => this.emit('bridge.error', { message: error.message });
    await Promise.all([...this.#kept.values()].map(resource => resource.close(true).catch(failed)));
    await Promise.all([...this.#shared.values()].map(resource => resource.close().catch(failed)));
    this.#kept.clear();
    this.#shared.clear();
  }

  #share(kind, at, make) {
    const key = JSON.stringify([kind, at.queue, at.prefix, at.connection]);
    if (!this.#shared.has(key)) {
      const resource = make(at);
      resource.on('error', error => this.emit(`${kind}.error`, { message: error.message }));
      this.#shared.set(key, resource);
    }
    return this.#shared.get(key);
  }
}
