// Runs a list of steps with BullMQ, with a clock that stands still during each step: the oracle of the differential
// tests. ../differential/bulltask_side.py documents the steps and runs them with bulltask.

import { FlowProducer, Queue, UnrecoverableError, Worker } from './client.js';

const RealDate = Date;

// Sets the clock of the whole process; null restores the real one.
function setClock(ms) {
  if (ms === null) {
    globalThis.Date = RealDate;
    return;
  }
  globalThis.Date = class extends RealDate {
    constructor(...args) {
      super(...(args.length ? args : [ms]));
    }

    static now() {
      return ms;
    }
  };
}

// One connection for all runs: each new one computes the hashes of all scripts.
const clients = new Map();

function sharedClient(connection) {
  const key = JSON.stringify(connection);
  if (!clients.has(key)) {
    const options = { connection: { ...connection, maxRetriesPerRequest: null }, skipMetasUpdate: true };
    clients.set(key, new Queue('connection', options).client);
  }
  return clients.get(key);
}

export async function runSequence({ queue: name, connection, prefix, steps, worker: workerOpts }) {
  const run = new Run(name, { connection: await sharedClient(connection), prefix }, workerOpts);
  try {
    return await run.all(steps);
  } finally {
    setClock(null);
    await run.close();
  }
}

class Run {
  ids = []; // of all jobs, in the order in which they were added
  held = []; // active jobs, in the order in which they were acquired
  scripts = new Set();

  constructor(name, at, workerOpts) {
    this.at = at;
    this.queue = new Queue(name, at);
    this.worker = new Worker(name, null, { ...at, autorun: false, ...workerOpts });
    this.flows = new FlowProducer(at);
    this.#recordScripts();
  }

  // Records the names of the scripts that this queue and its jobs call.
  #recordScripts() {
    const scripts = Object.getPrototypeOf(this.queue.scripts);
    const { execCommand } = scripts;
    const { scripts: called } = this;
    scripts.execCommand = function (client, script, args) {
      called.add(script);
      return execCommand.call(this, client, script, args);
    };
    this.stopRecording = () => Object.assign(scripts, { execCommand });
  }

  async all(steps) {
    await Promise.all([this.queue.waitUntilReady(), this.worker.waitUntilReady()]);
    this.client = await this.queue.client;
    const outcomes = [];
    for (const { at, do: op, ...step } of steps) {
      setClock(at);
      try {
        outcomes.push({ ok: (await STEPS[op](this, step)) ?? null });
      } catch (error) {
        outcomes.push({ error: error.message, code: error.code ?? null });
      }
    }
    return { outcomes, ids: this.ids, scripts: [...this.scripts] };
  }

  async close() {
    this.stopRecording();
    await Promise.all([this.worker.close(true), this.queue.close(), this.flows.close()]);
  }

  // Remembers a job and returns its number.
  number(id) {
    if (!this.ids.includes(id)) this.ids.push(id);
    return this.ids.indexOf(id);
  }

  // The id of the job that a step selects, of all jobs or of those in one state.
  async target({ job: index, of }) {
    let ids = this.ids;
    if (of) {
      const key = this.queue.toKey(of);
      const members = ['wait', 'paused', 'active'].includes(of)
        ? await this.client.lrange(key, 0, -1)
        : await this.client.zrange(key, 0, -1);
      ids = ids.filter(id => members.includes(id));
    }
    return ids.length ? ids[index % ids.length] : null;
  }

  async withJob(step, work) {
    const id = await this.target(step);
    if (id === null) return 'nothing';
    const job = await this.queue.getJob(id);
    if (!job) return 'gone';
    return work(job);
  }

  // Like a worker's processJob(), fails a job that has a deferred failure, and takes the next one.
  async hold(job, token) {
    if (!job) return null;
    if (job.deferredFailure) {
      const error = errorOf({ message: job.deferredFailure, unrecoverable: true, trace: '' });
      return this.holdFetched(await job.moveToFailed(error, token, true), token);
    }
    this.held.push(job);
    return this.number(job.id);
  }

  async withHeld({ held: index, token, ...step }, work) {
    if (!this.held.length) return 'nothing';
    const [job] = this.held.splice(index % this.held.length, 1);
    return work(job, token ?? job.token);
  }

  async holdFetched(result, token) {
    if (!Array.isArray(result)) return null;
    const [fields, id] = result;
    return this.hold(await this.worker.nextJobFromJobData(fields, id, token), token);
  }
}

function errorOf({ message, unrecoverable = false, trace }) {
  const error = unrecoverable ? new UnrecoverableError(message) : new Error(message);
  error.stack = trace;
  return error;
}

const STEPS = {
  add: async (run, { name, data, opts }) => run.number((await run.queue.add(name, data, opts)).id),
  add_bulk: async (run, { jobs }) => (await run.queue.addBulk(jobs)).map(job => run.number(job.id)),
  // Each job is remembered in the order in which it is added: the parent, then its children.
  flow: async (run, { flow }) => {
    const queueName = run.queue.name;
    const full = node => ({ ...node, queueName, ...(node.children && { children: node.children.map(full) }) });
    const numbered = ({ job, children = [] }) => [run.number(job.id), ...children.flatMap(numbered)];
    return numbered(await run.flows.add(full(flow)));
  },
  add_child: (run, { name, data, opts, ...step }) =>
    run.withJob(step, async parent =>
      run.number((await run.queue.add(name, data, { ...opts, parent: { id: parent.id, queue: run.queue.qualifiedName } })).id),
    ),

  pause: run => run.queue.pause(),
  resume: run => run.queue.resume(),
  drain: (run, { delayed }) => run.queue.drain(delayed),
  clean: async (run, { grace, limit, state }) => (await run.queue.clean(grace, limit, state)).map(id => run.ids.indexOf(id)),
  obliterate: (run, { force }) => run.queue.obliterate({ force }),
  retry_jobs: (run, { state }) => run.queue.retryJobs({ state }),
  promote_jobs: run => run.queue.promoteJobs(),
  rate_limit: (run, { ms }) => run.queue.rateLimit(ms).then(() => null),
  remove_rate_limit: async run => (await run.queue.removeRateLimitKey()) > 0,
  set_concurrency: (run, { n }) => run.queue.setGlobalConcurrency(n).then(() => null),
  remove_concurrency: async run => (await run.queue.removeGlobalConcurrency()) > 0,
  set_rate: (run, { max, ms }) => run.queue.setGlobalRateLimit(max, ms).then(() => null),
  remove_rate: async run => (await run.queue.removeGlobalRateLimit()) > 0,
  remove_dedup: async (run, { id }) => (await run.queue.removeDeduplicationKey(id)) > 0,

  flag_on: run => run.client.hset(run.queue.keys.meta, 'paused', 1).then(() => null),
  flag_off: run => run.client.hdel(run.queue.keys.meta, 'paused').then(() => null),

  acquire: async (run, { token }) => {
    run.worker.limitUntil = 0; // the worker does not fetch while it knows of a rate limit
    return run.hold(await run.worker.getNextJob(token, { block: false }), token);
  },
  complete: (run, { value, next, ...step }) =>
    run.withHeld(step, async (job, token) => run.holdFetched(await job.moveToCompleted(value, token, next), token)),
  fail: (run, { next, message, unrecoverable, trace, ...step }) =>
    run.withHeld(step, async (job, token) =>
      run.holdFetched(await job.moveToFailed(errorOf({ message, unrecoverable, trace }), token, next), token),
    ),
  delay: (run, { ms, ...step }) => run.withHeld(step, (job, token) => job.moveToDelayed(Date.now() + ms, token).then(() => null)),
  release: (run, step) => run.withHeld(step, (job, token) => job.moveToWait(token).then(() => null)),
  await_children: (run, step) => run.withHeld(step, (job, token) => job.moveToWaitingChildren(token)),
  extend_lock: async (run, { held, token, ms }) => {
    if (!run.held.length) return 'nothing';
    const job = run.held[held % run.held.length];
    return (await job.extendLock(token ?? job.token, ms)) === 1;
  },
  extend_locks: async (run, { ms }) => {
    const lost = await run.worker.scripts.extendLocks(run.held.map(job => job.id), run.held.map(job => job.token), ms);
    return lost.map(id => run.ids.indexOf(id));
  },
  expire_lock: (run, { held }) => {
    if (!run.held.length) return 'nothing';
    return run.client.del(run.queue.toKey(`${run.held[held % run.held.length].id}:lock`));
  },
  check_stalled: async run => {
    await run.client.del(run.queue.toKey('stalled-check'));
    return (await run.worker.scripts.moveStalledJobsToWait()).map(id => run.ids.indexOf(id));
  },

  upsert_scheduler: async (run, { id, repeat, template }) => Boolean(await run.queue.upsertJobScheduler(id, repeat, template)),
  get_scheduler: async (run, { id }) => {
    const scheduler = await run.queue.getJobScheduler(id);
    if (!scheduler) return null;
    const { key, name, next, iterationCount } = scheduler;
    return { key, name, next, iterationCount };
  },
  remove_scheduler: (run, { id }) => run.queue.removeJobScheduler(id),

  // The legacy API of repeatable jobs.
  add_repeatable: (run, { name, data, opts }) => run.queue.add(name, data, opts).then(() => null),
  repeatables: async run => (await run.queue.getRepeatableJobs(0, -1, true)).map(({ key, name, next }) => [key, name, next]),
  remove_repeatable: (run, { name, repeat, jobId }) => run.queue.removeRepeatable(name, repeat, jobId),
  remove_repeatable_by_key: (run, { key }) => run.queue.removeRepeatableByKey(key),

  promote: (run, step) => run.withJob(step, job => job.promote()),
  change_delay: (run, { ms, ...step }) => run.withJob(step, job => job.changeDelay(ms)),
  change_priority: (run, { priority, lifo, ...step }) =>
    run.withJob(step, job => job.changePriority({ priority, lifo })),
  update_data: (run, { data, ...step }) => run.withJob(step, job => job.updateData(data)),
  progress: (run, { value, ...step }) => run.withJob(step, job => job.updateProgress(value)),
  log: (run, { line, ...step }) => run.withJob(step, job => job.log(line)),
  clear_logs: (run, { keep, ...step }) => run.withJob(step, job => job.clearLogs(keep).then(() => null)),
  retry: (run, { state, ...step }) => run.withJob(step, job => job.retry(state)),
  remove: (run, { children, ...step }) => run.withJob(step, job => job.remove({ removeChildren: children })),
  // Without a parent, Node throws and bulltask returns false: a row of docs/reference/differences.md.
  remove_dependency: (run, step) => run.withJob(step, job => (job.parentKey ? job.removeChildDependency() : false)),
  remove_unprocessed: (run, step) => run.withJob(step, job => job.removeUnprocessedChildren()),

  // The jobs of one state, and their number: getWaiting, getWaitingCount …
  of_state: async (run, { state, start, end }) => {
    const jobs = await run.queue[`get${state}`](start, end);
    return [jobs.map(job => run.ids.indexOf(job.id)), await run.queue[`get${state}Count`]()];
  },
  count_by_types: (run, { states }) => run.queue.getJobCountByTypes(...states),
  counts: (run, { states }) => run.queue.getJobCounts(...states),
  counts_per_priority: (run, { priorities }) => run.queue.getCountsPerPriority(priorities),
  jobs: async (run, { states, start, end, asc }) =>
    (await run.queue.getJobs(states, start, end, asc)).map(job => run.ids.indexOf(job.id)),
  state: (run, step) => run.withJob(step, job => job.getState()),
  finished: (run, step) => run.withJob(step, async job => run.queue.scripts.isFinished(job.id, true)),
  is_maxed: run => run.queue.isMaxed(),
  rate_ttl: async (run, { max }) => Math.ceil(Math.max(0, await run.queue.getRateLimitTtl(max)) / 100_000),
  metrics: (run, { kind }) => run.queue.getMetrics(kind),
  dependency_counts: (run, step) => run.withJob(step, job => job.getDependenciesCount()),
  dependencies: async (run, { kind, ...step }) =>
    run.withJob(step, async job => (await run.queue.getDependencies(job.id, kind, 0, -1)).total),
};
