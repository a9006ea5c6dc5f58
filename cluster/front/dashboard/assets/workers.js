// Workers as a grid: a row for each node, a column for each role, a card for each worker.

import { byId, h, keyed, setAttr, setStyle, setText } from "./dom.js";
import { count, percent } from "./format.js";

const ROLES = ["prefill", "decode", "mixed"];
const SAYS = { up: "up", draining: "draining", down: "no link", lost: "lost", connecting: "connecting" };

export class Workers {
  /** @param {HTMLElement} root @param {import("./store.js").Store} store @param {(id: string) => void} onPick */
  constructor(root, store, onPick) {
    this.store = store;
    this.onPick = onPick;
    this.grid = h("div", { class: "fleet", attrs: { role: "table", "aria-labelledby": "workers-title" } });
    root.append(this.grid);
    /** @type {Map<string, [number, number][]>} tokens made by each worker, with their times */
    this.made = new Map();
  }

  /** @param {import("./store.js").Snapshot} snapshot */
  render(snapshot) {
    const roles = ROLES.filter((role) => snapshot.workers.some((worker) => worker.role === role));
    const nodes = [...new Set(snapshot.workers.map((worker) => worker.node))].sort();
    setStyle(this.grid, "--num-roles", String(Math.max(roles.length, 1)));
    const head = { key: "head", node: "Node", workers: [] };
    const rows = nodes.map((node) => ({ key: node, node, workers: snapshot.workers.filter((w) => w.node === node) }));
    keyed(this.grid, [head, ...rows], (row) => row.key, () => h("div", { class: "node", attrs: { role: "row" } }), (element, row) =>
      this.row(element, row, roles),
    );
    const pools = snapshot.pools.filter((p) => p.target + p.num_ready + p.num_starting + p.num_draining > 0).map(poolText);
    setText(byId("pools"), pools.join(", ") || (snapshot.workers.length ? "" : "none yet"));
  }

  /** @param {HTMLElement} element @param {{key: string, node: string, workers: any[]}} row @param {string[]} roles */
  row(element, row, roles) {
    const isHead = row.key === "head";
    const cells = [{ role: "", text: row.node }, ...roles.map((role) => ({ role, text: role }))];
    setAttr(element, "class", isHead ? "node head" : "node");
    const make = (/** @type {{role: string}} */ cell) => {
      const kind = isHead ? "columnheader" : cell.role ? "cell" : "rowheader";
      return h("div", { class: cell.role ? "cell" : "cell name", attrs: { role: kind } });
    };
    keyed(element, cells, (cell) => cell.role || "node", make, (place, cell) => {
      if (isHead || !cell.role) return setText(place, cell.text);
      setAttr(place, "data-role", cell.role);
      const own = row.workers.filter((worker) => worker.role === cell.role);
      keyed(place, own, (worker) => worker.id, (worker) => this.card(worker), (card, worker) => this.update(card, worker));
    });
  }

  /** @param {any} worker */
  card(worker) {
    const meter = h("div", { class: "meter", attrs: { role: "img" } }, h("i", { class: "used" }), h("i", { class: "leased" }));
    const card = h(
      "button",
      { class: "worker", attrs: { type: "button" } },
      h("span", { class: "title" }),
      h("span", { class: "state" }),
      meter,
      h("span", { class: "facts" }),
      h("span", { class: "problem" }),
    );
    card.addEventListener("click", () => this.onPick(worker.id));
    return card;
  }

  /** @param {HTMLElement} card @param {any} worker */
  update(card, worker) {
    const [title, state, meter, facts, problem] = /** @type {HTMLElement[]} */ ([...card.children]);
    const name = worker.name || worker.id.slice(0, 8);
    setAttr(card, "data-state", worker.state);
    setText(title, name);
    setText(state, SAYS[/** @type {keyof SAYS} */ (worker.state)] ?? worker.state);
    meter.hidden = !worker.num_blocks || worker.state === "down";
    if (!meter.hidden) {
      const leased = worker.num_leased_blocks / worker.num_blocks;
      const used = Math.max(worker.num_used_blocks / worker.num_blocks - leased, 0);
      setStyle(/** @type {HTMLElement} */ (meter.children[0]), "width", `${(used * 100).toFixed(1)}%`);
      setStyle(/** @type {HTMLElement} */ (meter.children[1]), "width", `${(leased * 100).toFixed(1)}%`);
      setAttr(meter, "aria-label", `KV ${percent(used + leased)} in use, ${percent(leased)} leased`);
    }
    setText(facts, meter.hidden ? "" : this.facts(worker));
    setText(problem, worker.problem || (worker.num_failed_steps ? `${worker.num_failed_steps} steps failed` : ""));
    setAttr(card, "title", `${name}, ${worker.address}, pool ${worker.pool}. Click: its requests`);
  }

  /** @param {any} worker */
  facts(worker) {
    const hits = worker.num_prompt_tokens ? `, ${percent(worker.num_cached_tokens / worker.num_prompt_tokens)} hits` : "";
    const leases = worker.num_open_leases ? `, ${worker.num_open_leases} leases` : "";
    const kv = percent(worker.num_used_blocks / worker.num_blocks);
    return `${worker.num_running} run, ${worker.num_waiting} wait, ${count(this.speed(worker))} tok/s, KV ${kv}${hits}${leases}`;
  }

  /** Tokens a second that it prefills and decodes. @param {any} worker */
  speed(worker) {
    const total = worker.num_prefill_tokens + worker.num_decode_tokens;
    const now = this.store.now();
    const seen = (this.made.get(worker.id) ?? []).filter(([at]) => at > now - 3);
    seen.push([now, total]);
    this.made.set(worker.id, seen);
    const [first] = seen;
    return now > first[0] ? Math.max(Math.round((total - first[1]) / (now - first[0])), 0) : 0;
  }
}

/** @param {any} pool */
function poolText(pool) {
  const starting = pool.num_starting ? `, ${pool.num_starting} starting` : "";
  const draining = pool.num_draining ? `, ${pool.num_draining} draining` : "";
  return `${pool.name} ${pool.num_ready} of ${pool.target}${starting}${draining}`;
}
