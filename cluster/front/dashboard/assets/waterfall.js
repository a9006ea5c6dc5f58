// The phases of one request as segments in time, since its receipt. Pure.
//
// Workers report durations, not instants: until a request's first token, its queue and its prefill are one; until its
// second, the phases of its hand-off are. `isOpen` marks such a segment, and the one that still grows.

/** @typedef {{name: string, from: number, to: number, isOpen: boolean}} Segment seconds since receipt */

const MIN_S = 0.01; // that the scale resolves

/** Names of the segments, as the legend has them. */
export const SEGMENTS = {
  queue: "queue",
  prefill: "prefill",
  deliver: "delivery",
  announce: "announced",
  pull: "pull",
  wait: "wait",
  decode: "decode",
  migrate: "migration",
};

/** Place of a time on a scale that shows milliseconds beside minutes, in [0, 1]. @param {number} s @param {number} span */
export function place(s, span) {
  return Math.min(Math.log1p(Math.max(s, 0) / MIN_S) / Math.log1p(span / MIN_S), 1);
}

/** Ticks of the scale, in seconds. @param {number} span */
export function ticks(span) {
  return [0.01, 0.1, 1, 10, 100, 1000].filter((s) => s < span * 0.8);
}

/**
 * Segments of a request: those that add up, and those of the hand-off that ran beside the prefill.
 * @param {Record<string, any>} request @param {number} now the router's clock, seconds
 * @returns {{sums: Segment[], beside: Segment[]}}
 */
export function segments(request, now) {
  const end = (request.ended_at ?? now) - request.started_at;
  const sums = /** @type {Segment[]} */ ([]);
  const beside = /** @type {Segment[]} */ ([]);
  let at = 0;
  /** @param {string} name @param {number} to @param {boolean} [isOpen] */
  const add = (name, to, isOpen = false) => {
    if (to > at) sums.push({ name, from: at, to, isOpen });
    at = Math.max(at, to);
  };
  const isLive = request.outcome === null;
  if (request.timings === null || request.first_at === null) {
    const routed = request.routed_at === null ? end : request.routed_at - request.started_at;
    add("queue", routed, isLive && request.phase === "queue");
    add(request.phase === "queue" ? "queue" : "prefill", end, isLive);
    return { sums, beside };
  }
  const t = request.timings;
  add("queue", t.queue);
  add("prefill", at + t.prefill);
  add("deliver", at + t.deliver_first);
  const first = at;
  if (request.second_at === null) {
    add(request.phase === "pull" ? "pull" : "decode", end, isLive);
    return { sums, beside };
  }
  add("pull", at + t.last_segment);
  if (t.pull > 0) {
    const from = Math.max(at - t.pull, t.queue);
    beside.push({ name: "announce", from: Math.max(from - t.announce_to_pull, t.queue), to: from, isOpen: false });
    beside.push({ name: "pull", from, to: at, isOpen: false });
  }
  add("wait", at + t.commit);
  add("decode", at + t.first_decode);
  add("deliver", Math.max(at + t.deliver_second, first));
  add(request.phase === "migrate" ? "migrate" : "decode", end, isLive);
  return { sums, beside };
}
