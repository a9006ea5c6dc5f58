// Tables of links, leases, migrations and decisions.

import { linkName } from "./charts.js";
import { byId, h, table } from "./dom.js";
import { bytes, count } from "./format.js";
import { linkKey, sum } from "./store.js";

const CAUSES = {
  drain: "migrations: their worker drained",
  budget: "migrations: their worker gave up decodes",
  memory: "migrations: their worker was short of KV blocks",
};

export class Causes {
  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.store = store;
    const number = true;
    const columns = [{ text: "link" }, { text: "by" }, { text: "a second", number }, { text: "in all", number }, { text: "failed", number }];
    this.links = table("KV transfers by link", columns);
    this.none = h("p", { class: "muted", text: "No KV has moved yet." });
    this.numbers = table("Leases, migrations and decisions", [{ text: "what" }, { text: "number", number }]);
    byId("links").append(this.links.element, this.none);
    byId("causes").append(this.numbers.element);
  }

  /** @param {import("./store.js").Snapshot} snapshot */
  render(snapshot) {
    const links = [...snapshot.links].sort((a, b) => b.num_bytes - a.num_bytes);
    this.none.hidden = links.length > 0;
    this.links.element.hidden = !links.length;
    this.links.fill(links.map((link) => this.link(link)));
    this.numbers.fill(this.rows(snapshot));
  }

  /** @param {any} link */
  link(link) {
    const key = linkKey(link);
    const speed = bytes(this.store.rate((sample) => sample.links[key] ?? 0));
    const cells = [linkName(this.store, key), link.transport || "–", speed, bytes(link.num_bytes), count(link.num_failed)];
    return { key, cells, tone: link.num_failed ? "warn" : "" };
  }

  /** @param {import("./store.js").Snapshot} snapshot */
  rows(snapshot) {
    const { totals, workers, control } = snapshot;
    const late = sum(workers, "num_late_leases");
    const expired = sum(workers, "num_expired_leases");
    const rows = [
      row("leases open", sum(workers, "num_open_leases")),
      row("leases late: about to expire", late, late ? "warn" : ""),
      row("leases that expired, blocks reclaimed", expired, expired ? "warn" : ""),
      row("KV blocks leased", sum(workers, "num_leased_blocks")),
      ...Object.entries(CAUSES).map(([cause, says]) => row(says, totals.moves[cause] ?? 0)),
      row("migrations that failed, and ran on", totals.num_failed_migrations, totals.num_failed_migrations ? "warn" : ""),
      row("requests resumed after a failure", totals.num_resumes, totals.num_resumes ? "warn" : ""),
      row("sequences preempted", sum(workers, "num_preemptions")),
    ];
    const made = control.controller_decisions ?? {};
    for (const [kind, num] of Object.entries(made)) {
      const failed = control.controller_decisions_failed?.[kind] ?? 0;
      rows.push(row(kind === "budgets" ? "role flips and budgets decided" : "pool sizes decided", num));
      if (failed) rows.push(row(`${kind}: of those, without effect`, failed, "warn"));
    }
    return rows;
  }
}

/** @param {string} what @param {number} num @param {string} [tone] */
function row(what, num, tone = "") {
  return { key: what, cells: [what, count(num)], tone };
}
