// Long-term charts for bull-board, from the tables of bulltask's data pipeline: a `historyProvider` that reads from
// `bulltask history serve` on this machine. It stores no data, so it has no `getUsage` and no `purge`.

const HOUR_MS = 3_600_000;
const SIZES_MS = { hour: HOUR_MS, day: 24 * HOUR_MS };
const OUTCOMES = ['completed', 'failed']; // the tables do not contain the age of the oldest waiting job
const METRICS = { runtime: 'run', waittime: 'wait' };
const CACHE_MS = 60_000; // bull-board reloads each chart every few seconds
const MAX_CACHED = 200;
const TIMEOUT_MS = 60_000;

export class LakeHistory {
  #url;
  #cache = new Map();

  constructor(url) {
    this.#url = url;
  }

  // Attempts with an outcome, as in BullMQ's metrics: [{ ts, value }], ts in milliseconds.
  async getHistory({ queue, metric, from, to, granularity }) {
    const size = SIZES_MS[granularity];
    const [first, last] = span(from, to, size);
    if (!OUTCOMES.includes(metric) || first > last) return [];
    const points = await this.#query('attempt-counts', { outcome: metric, every: granularity, queue, ...times(first, last) });
    const counts = new Map(points.map(({ at, attempts }) => [Date.parse(at), attempts]));
    if (!counts.size || granularity === 'hour') return [...counts].map(([ts, value]) => ({ ts, value }));
    const days = [];
    for (let ts = Math.max(first, Math.min(...counts.keys())); ts <= last; ts += size) days.push(ts);
    return days.map((ts) => ({ ts, value: counts.get(ts) ?? 0 }));
  }

  // Milliseconds by percentile: [{ ts, count, values: { 50: 120 } }]; `range` is one point for the whole period.
  async getLatency({ queue, metric, from, to, granularity, percentiles }) {
    const [first, last] = span(from, to, SIZES_MS[granularity] ?? 1);
    if (first > last) return [];
    const points = await this.#query('latency', {
      metric: METRICS[metric],
      percentiles: percentiles.join(','),
      every: granularity === 'range' ? '' : granularity,
      queue,
      ...times(first, last),
    });
    return points.map(({ at, attempts, percentiles: seconds }) => ({
      ts: Date.parse(at),
      count: attempts,
      values: Object.fromEntries(Object.entries(seconds).map(([percentile, s]) => [Number(percentile), Math.round(s * 1000)])),
    }));
  }

  async #query(path, parameters) {
    const defined = Object.entries(parameters).filter(([, value]) => value !== undefined);
    const url = new URL(`${path}?${new URLSearchParams(defined)}`, this.#url);
    const cached = this.#cache.get(url.href);
    if (cached && cached.until > Date.now()) return cached.response;
    const response = this.#fetch(url);
    if (this.#cache.size >= MAX_CACHED) this.#cache.delete(this.#cache.keys().next().value);
    this.#cache.set(url.href, { response, until: Date.now() + CACHE_MS });
    response.catch(() => this.#cache.delete(url.href));
    return response;
  }

  async #fetch(url) {
    const response = await fetch(url, { signal: AbortSignal.timeout(TIMEOUT_MS) });
    const body = await response.json();
    if (!response.ok) throw new Error(`bulltask history serve: ${body.error}`);
    return body;
  }
}

// From the beginning of an hour or day, so that the first one is complete, to the current time at most.
function span(from, to, size) {
  return [Math.floor(Math.max(0, from) / size) * size, Math.min(to, Date.now())];
}

// bull-board's ranges include both ends; the lake's `until` is exclusive.
function times(first, last) {
  return { since: new Date(first).toISOString(), until: new Date(last + 1).toISOString() };
}
