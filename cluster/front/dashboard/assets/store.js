// The newest snapshot, its clock, and the last minutes of what its counters did. docs/dashboard.md describes the fields.

/** @typedef {Record<string, any>} Worker */
/**
 * @typedef {object} Snapshot
 * @property {{id: string, host: string, pid: number, num_routers: number, version: string, model: string}} router
 * @property {{ttft_s: number, tpot_s: number}} level
 * @property {Worker[]} workers
 * @property {Record<string, any>[]} links
 * @property {{at: number, kind: string, subject: string, detail: string, num: number}[]} events
 * @property {Record<string, any>} totals
 * @property {Record<string, any>[]} pools
 * @property {Record<string, any>[]} decisions
 * @property {Record<string, Record<string, number>>} control
 * @property {string[]} columns
 * @property {string[]} phases
 * @property {string[]} names
 * @property {any[][]} live
 * @property {any[][]} ended
 * @property {number} num_live
 * @property {number} now
 */

export const SPAN_S = 300; // of the charts
const RATE_S = 3; // over which a rate is taken

export class Store {
  constructor() {
    /** @type {Snapshot | null} */
    this.snapshot = null;
    this.receivedAt = 0;
    /** @type {Record<string, number>} */
    this.column = {};
    /** @type {Sample[]} */
    this.samples = [];
  }

  /** Take a snapshot; null: the last one holds. Returns whether it is of another router than the one before.
   * @param {Snapshot | null} snapshot @param {number} at ms */
  take(snapshot, at) {
    const before = this.snapshot?.router.id;
    if (snapshot) {
      if (before !== undefined && before !== snapshot.router.id) this.samples = [];
      this.snapshot = snapshot;
      this.receivedAt = at;
      this.column = Object.fromEntries(snapshot.columns.map((name, i) => [name, i]));
    }
    if (this.snapshot) this.samples.push(new Sample(this.snapshot, this.now(at), Date.now() / 1000));
    while (this.samples.length && this.samples[0].at < this.now(at) - SPAN_S) this.samples.shift();
    return snapshot !== null && before !== undefined && before !== snapshot.router.id;
  }

  /** The router's clock, in seconds. @param {number} [at] ms */
  now(at = performance.now()) {
    return this.snapshot ? this.snapshot.now + (at - this.receivedAt) / 1000 : 0;
  }

  /** Name of a worker, by its incarnation. @param {string | null | undefined} id */
  nameOf(id) {
    if (!id) return "–";
    return this.snapshot?.workers.find((worker) => worker.id === id)?.name || id.slice(0, 8);
  }

  /** Increase of a counter a second, up to sample `i`. @param {(sample: Sample) => number} counter */
  rate(counter, i = this.samples.length - 1) {
    const last = this.samples[i];
    if (!last) return 0;
    let first = i;
    while (first > 0 && this.samples[first].at > last.at - RATE_S) first--;
    const passed = last.at - this.samples[first].at;
    return passed > 0 ? Math.max(counter(last) - counter(this.samples[first]), 0) / passed : 0;
  }
}

/** What a chart needs of a snapshot: a few numbers. */
export class Sample {
  /** @param {Snapshot} snapshot @param {number} at @param {number} time Unix s */
  constructor(snapshot, at, time) {
    const workers = snapshot.workers.filter((worker) => worker.num_blocks);
    const levels = snapshot.totals.levels;
    this.at = at;
    this.time = time;
    this.prompt = snapshot.totals.num_prompt_tokens;
    this.cached = snapshot.totals.num_cached_tokens;
    this.output = snapshot.totals.num_output_tokens;
    this.prefilled = sum(workers, "num_prefill_tokens");
    this.met = levels.met ?? 0;
    this.missed = (levels.missed_ttft ?? 0) + (levels.missed_tpot ?? 0) + (levels.missed_both ?? 0);
    this.unserved = (levels.failed ?? 0) + (levels.refused ?? 0);
    this.open = sum(workers, "num_open_leases");
    this.late = sum(workers, "num_late_leases");
    this.expired = sum(workers, "num_expired_leases");
    this.live = snapshot.num_live;
    /** @type {Record<string, number>} share of the KV blocks in use, by pool */
    this.kv = {};
    for (const pool of new Set(workers.map((worker) => worker.pool))) {
      const own = workers.filter((worker) => worker.pool === pool);
      this.kv[pool] = sum(own, "num_used_blocks") / sum(own, "num_blocks");
    }
    /** @type {Record<string, number>} bytes, by link */
    this.links = Object.fromEntries(snapshot.links.map((link) => [linkKey(link), link.num_bytes]));
  }
}

/** @param {Record<string, any>} link */
export function linkKey(link) {
  return `${link.source}>${link.worker}`;
}

/** @param {Record<string, any>[]} items @param {string} field */
export function sum(items, field) {
  return items.reduce((total, item) => total + (item[field] ?? 0), 0);
}
