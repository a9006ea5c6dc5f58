// Charts of the last minutes, with uPlot. Their numbers are taken from the snapshots that this page has seen.

import { h } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { SPAN_S } from "./store.js";

const HEIGHT_PX = 150;
const MAX_LINES = 6;
const DRAWN_AT_ONCE = 2;
const MIN_SPAN_S = 60;
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

/** @typedef {import("./store.js").Store} Store */
/** @typedef {{name: string, value: (store: Store, i: number) => number | null}} Line */
/** @typedef {{title: string, format: (n: number) => string, top?: number, lines: (store: Store) => Line[]}} ChartKind */

/** @type {ChartKind[]} */
const KINDS = [
  {
    title: "Tokens a second",
    format: count,
    lines: () => [
      { name: "output", value: (store, i) => store.rate((s) => s.output, i) },
      { name: "prefilled", value: (store, i) => store.rate((s) => s.prefilled, i) },
    ],
  },
  {
    title: "Goodput: requests a second",
    format: count,
    lines: () => [
      { name: "met their level", value: (store, i) => store.rate((s) => s.met, i) },
      { name: "missed it", value: (store, i) => store.rate((s) => s.missed, i) },
      { name: "failed or refused", value: (store, i) => store.rate((s) => s.unserved, i) },
    ],
  },
  {
    title: "KV blocks in use",
    format: percent,
    top: 1,
    lines: (store) =>
      Object.keys(store.samples.at(-1)?.kv ?? {}).map((pool) => ({ name: pool, value: (s, i) => s.samples[i].kv[pool] ?? null })),
  },
  {
    title: "Prefix hits: share of prompt tokens",
    format: percent,
    top: 1,
    lines: () => [{ name: "cached", value: hits }],
  },
  {
    title: "KV moved, by link, a second",
    format: bytes,
    lines: (store) =>
      Object.keys(store.samples.at(-1)?.links ?? {})
        .slice(0, MAX_LINES)
        .map((key) => ({ name: linkName(store, key), value: (s, i) => s.rate((sample) => sample.links[key] ?? 0, i) })),
  },
  {
    title: "Leases",
    format: count,
    lines: () => [
      { name: "open", value: (store, i) => store.samples[i].open },
      { name: "late", value: (store, i) => store.samples[i].late },
      { name: "reclaimed a second", value: (store, i) => store.rate((s) => s.expired, i) },
    ],
  },
];

export class Charts {
  /** @param {HTMLElement} root @param {Store} store */
  constructor(root, store) {
    this.store = store;
    this.next = 0;
    this.charts = KINDS.map((kind) => new Chart(root, kind, store));
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe(root);
  }

  /** Draw some of the charts: all of them in turn, so that no frame draws all. */
  render() {
    for (let i = 0; i < DRAWN_AT_ONCE; i++) {
      this.charts[this.next].draw();
      this.next = (this.next + 1) % this.charts.length;
    }
  }

  recolour() {
    for (const chart of this.charts) chart.remake();
  }
}

class Chart {
  /** @param {HTMLElement} root @param {ChartKind} kind @param {Store} store */
  constructor(root, kind, store) {
    this.kind = kind;
    this.store = store;
    this.place = h("div", { class: "plot" });
    this.card = h("section", { class: "card", attrs: { "aria-label": kind.title } }, h("h2", { text: kind.title }), this.place);
    root.append(this.card);
    /** @type {any} */
    this.plot = null;
    this.names = "";
  }

  draw() {
    const lines = this.kind.lines(this.store);
    const names = lines.map((line) => line.name).join("\n");
    if (!lines.length) return;
    const samples = this.store.samples;
    const times = samples.map((sample) => sample.time);
    const data = [times, ...lines.map((line) => samples.map((_, i) => line.value(this.store, i)))];
    if (this.plot && names === this.names) {
      this.plot.setData(data);
    } else {
      this.names = names;
      this.plot?.destroy();
      this.plot = new /** @type {any} */ (globalThis).uPlot(this.options(lines), data, this.place);
    }
    this.showLast();
  }

  /** Show the newest values beside the names, unless the pointer is at others. */
  showLast() {
    if (this.plot && this.plot.cursor.left < 0) this.plot.setLegend({ idx: this.store.samples.length - 1 });
  }

  resize() {
    this.plot?.setSize({ width: this.width, height: HEIGHT_PX });
  }

  remake() {
    this.names = "";
    this.draw();
  }

  /** Times that it shows: at least a minute, at most SPAN_S. @returns {[number, number]} Unix s */
  range() {
    const now = Date.now() / 1000;
    const first = this.store.samples[0]?.time ?? now;
    return [Math.max(Math.min(first, now - MIN_SPAN_S), now - SPAN_S), now];
  }

  get width() {
    return Math.max(this.place.clientWidth, 120);
  }

  /** @param {Line[]} lines */
  options(lines) {
    const colour = (/** @type {string} */ name) => colourOf(this.place, name);
    const { format, top } = this.kind;
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const value = (/** @type {any} */ _, /** @type {number | null} */ n) => (n === null || n === undefined ? "–" : format(n));
    return {
      width: this.width,
      height: HEIGHT_PX,
      cursor: { y: false, points: { size: 6 } },
      scales: {
        x: { range: () => this.range() },
        y: { range: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ max) => [0, top ?? Math.max(max * 1.15, 1)] },
      },
      axes: [
        { ...axis, size: 26, space: 62, values: (/** @type {any} */ _, /** @type {number[]} */ all) => all.map(timeText) },
        { ...axis, size: 56, space: 34, values: (/** @type {any} */ _, /** @type {number[]} */ all) => all.map((n) => format(n)) },
      ],
      series: [
        { label: "at", value: (/** @type {any} */ _, /** @type {number | null} */ t) => (t ? timeText(t) : "–") },
        ...lines.map((line, i) => ({
          label: line.name,
          stroke: colour(COLOURS[i % COLOURS.length]),
          width: 1.75,
          dash: i >= 3 ? [5, 3] : undefined,
          points: { show: false },
          value,
        })),
      ],
      legend: { live: true },
      hooks: { ready: [() => this.showLast()], setSize: [() => this.showLast()] },
    };
  }
}

/** Colour that a variable has now, as a canvas takes it. @param {HTMLElement} element @param {string} name */
function colourOf(element, name) {
  element.style.color = `var(${name})`;
  const found = getComputedStyle(element).color;
  element.style.removeProperty("color");
  return found;
}

/** @param {number} time Unix s */
function timeText(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false, hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

/** @param {Store} store @param {number} i */
function hits(store, i) {
  const prompt = store.rate((s) => s.prompt, i);
  return prompt > 0 ? Math.min(store.rate((s) => s.cached, i) / prompt, 1) : null;
}

/** @param {Store} store @param {string} key */
export function linkName(store, key) {
  const [source, worker] = key.split(">");
  return `${store.nameOf(source)} → ${store.nameOf(worker)}`;
}
