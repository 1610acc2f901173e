// bull-board's charts over months, from the tables of bulltask's data pipeline: a `historyProvider` that asks
// `bulltask job serve`, on this machine. It stores nothing, so it has no `getUsage` and no `purge`.

const HOUR_MS = 3_600_000;
const SIZES_MS = { hour: HOUR_MS, day: 24 * HOUR_MS };
const OUTCOMES = ['completed', 'failed']; // the age of the oldest waiting job is in no table
const METRICS = { runtime: 'run', waittime: 'wait' };
const KEEP_MS = 60_000; // a board asks every few seconds, for each of its charts
const MOST_KEPT = 200;
const TIMEOUT_MS = 60_000;

export class LakeHistory {
  #url;
  #kept = new Map();

  constructor(url) {
    this.#url = url;
  }

  // Attempts that ended so, as BullMQ's own metrics count them: [{ ts, value }], ts in milliseconds.
  async getHistory({ queue, metric, from, to, granularity }) {
    const size = SIZES_MS[granularity];
    const [first, last] = span(from, to, size);
    if (!OUTCOMES.includes(metric) || first > last) return [];
    const points = await this.#ask('rate', { outcome: metric, every: granularity, queue, ...times(first, last) });
    const found = new Map(points.map(({ at, attempts }) => [Date.parse(at), attempts]));
    if (!found.size || granularity === 'hour') return [...found].map(([ts, value]) => ({ ts, value }));
    const days = [];
    for (let ts = Math.max(first, Math.min(...found.keys())); ts <= last; ts += size) days.push(ts);
    return days.map((ts) => ({ ts, value: found.get(ts) ?? 0 }));
  }

  // Milliseconds by percentile: [{ ts, count, values: { 50: 120 } }]; `range` is one point of the whole time.
  async getLatency({ queue, metric, from, to, granularity, percentiles }) {
    const [first, last] = span(from, to, SIZES_MS[granularity] ?? 1);
    if (first > last) return [];
    const points = await this.#ask('latency', {
      metric: METRICS[metric],
      percentiles: percentiles.join(','),
      every: granularity === 'range' ? '' : granularity,
      queue,
      ...times(first, last),
    });
    return points.map(({ at, attempts, percentiles: seconds }) => ({
      ts: Date.parse(at),
      count: attempts,
      values: Object.fromEntries(Object.entries(seconds).map(([one, s]) => [Number(one), Math.round(s * 1000)])),
    }));
  }

  async #ask(question, asked) {
    const given = Object.entries(asked).filter(([, value]) => value !== undefined);
    const url = new URL(`${question}?${new URLSearchParams(given)}`, this.#url);
    const kept = this.#kept.get(url.href);
    if (kept && kept.until > Date.now()) return kept.answer;
    const answer = this.#fetch(url);
    if (this.#kept.size >= MOST_KEPT) this.#kept.delete(this.#kept.keys().next().value);
    this.#kept.set(url.href, { answer, until: Date.now() + KEEP_MS });
    answer.catch(() => this.#kept.delete(url.href));
    return answer;
  }

  async #fetch(url) {
    const response = await fetch(url, { signal: AbortSignal.timeout(TIMEOUT_MS) });
    const body = await response.json();
    if (!response.ok) throw new Error(`bulltask job serve: ${body.error}`);
    return body;
  }
}

// From the beginning of an hour or a day, so that the first one is whole, to now at most.
function span(from, to, size) {
  return [Math.floor(Math.max(0, from) / size) * size, Math.min(to, Date.now())];
}

// Both ends belong to what a board asks for; for the lake, `until` does not.
function times(first, last) {
  return { since: new Date(first).toISOString(), until: new Date(last + 1).toISOString() };
}
