// The row of figures at the top.

import { h, keyed, setAttr, setText } from "./dom.js";
import { count, percent } from "./format.js";
import { sum } from "./store.js";

const GOOD = 0.9; // least goodput that is shown as good

export class Tiles {
  /** @param {HTMLElement} root @param {import("./store.js").Store} store */
  constructor(root, store) {
    this.root = root;
    this.store = store;
  }

  /** @param {import("./store.js").Snapshot} snapshot */
  render(snapshot) {
    keyed(this.root, this.figures(snapshot), (tile) => tile.name, make, update);
  }

  /** @param {import("./store.js").Snapshot} snapshot */
  figures(snapshot) {
    const store = this.store;
    const workers = snapshot.workers.filter((worker) => worker.num_blocks);
    const up = snapshot.workers.filter((worker) => worker.state === "up").length;
    const { levels, num_prompt_tokens: prompt, num_cached_tokens: cached } = snapshot.totals;
    const judged = Object.values(levels).reduce((total, n) => total + n, 0);
    const good = judged ? (levels.met ?? 0) / judged : null;
    const used = sum(workers, "num_used_blocks") / sum(workers, "num_blocks");
    const expired = sum(workers, "num_expired_leases");
    const bad = snapshot.workers.length - up;
    const level = `level ${snapshot.level.ttft_s} / ${snapshot.level.tpot_s} s`;
    return [
      tile("Requests", count(snapshot.num_live), `${store.rate((s) => s.met + s.missed + s.unserved).toFixed(1)} ended/s`),
      tile("Output", `${count(Math.round(store.rate((s) => s.output)))}/s`, "tokens"),
      tile("Prefill", `${count(Math.round(store.rate((s) => s.prefilled)))}/s`, "tokens computed"),
      tile("Goodput", percent(good), level, good === null ? "" : good >= GOOD ? "good" : "warn"),
      tile("Workers", `${up} of ${snapshot.workers.length}`, bad ? `${bad} not up` : "all up", bad ? "bad" : "good"),
      tile("KV in use", percent(used), "of all blocks", used > GOOD ? "warn" : ""),
      tile("Prefix hits", percent(prompt ? cached / prompt : null), "of prompt tokens"),
      tile("Leases", count(sum(workers, "num_open_leases")), `${count(expired)} reclaimed`, expired ? "warn" : ""),
    ];
  }
}

/** @param {string} name @param {string} value @param {string} detail @param {string} [tone] */
function tile(name, value, detail, tone = "") {
  return { name, value, detail, tone };
}

/** @param {{name: string}} figure */
function make(figure) {
  return h("div", { class: "tile" }, h("h3", { text: figure.name }), h("p", { class: "value" }), h("p", { class: "muted" }));
}

/** @param {HTMLElement} element @param {{value: string, detail: string, tone: string}} figure */
function update(element, figure) {
  setText(element.children[1], figure.value);
  setText(element.children[2], figure.detail);
  setAttr(element, "data-tone", figure.tone);
}
