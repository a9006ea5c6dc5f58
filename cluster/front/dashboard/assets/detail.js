// All that is known of the request that a person has chosen.

import { h, setText, table } from "./dom.js";
import { bytes, duration } from "./format.js";

const SAYS = {
  queue: "queue, at the router and its worker",
  prefill: "prefill",
  deliver_first: "delivery of the first token",
  last_segment: "pull after the first token",
  commit: "wait: release, commit, queue",
  first_decode: "second token",
  deliver_second: "delivery of the second token",
  announce_to_pull: "announced, before the first read (beside the prefill)",
  pull: "reads in all (beside the prefill)",
};

export class RequestDetail {
  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.store = store;
    this.title = h("h3");
    this.text = h("p", { class: "muted" });
    this.table = table("Phases of the request", [{ text: "phase" }, { text: "time", number: true }]);
    this.element = h("div", { class: "detail", attrs: { "aria-live": "off" } }, this.title, this.text, this.table.element);
    this.element.hidden = true;
  }

  /** @param {Record<string, any> | null} request */
  show(request) {
    this.element.hidden = !request;
    if (!request) return;
    setText(this.title, request.id);
    setText(this.text, this.facts(request));
    const phases = request.timings ? Object.entries(SAYS).filter(([name]) => request.timings[name] > 0) : [];
    const rows = phases.map(([name, says]) => ({ key: name, cells: [says, duration(request.timings[name])] }));
    const since = (request.ended_at ?? this.store.now()) - request.started_at;
    this.table.fill([...rows, { key: "total", cells: ["since its receipt", duration(since)] }]);
  }

  /** @param {Record<string, any>} request */
  facts(request) {
    const facts = [
      `${request.num_prompt} prompt tokens, ${request.num_cached} of them cached`,
      `${request.num_output} of ${request.max_output} output tokens`,
      request.source ? `prompt on ${this.store.nameOf(request.source)}, decode on ${this.store.nameOf(request.worker)}` : "no worker yet",
      `tier ${request.tier}`,
    ];
    if (request.key) facts.push(`key ${request.key}`);
    if (request.transport) facts.push(`${bytes(request.handoff_bytes)} of KV by ${request.transport}`);
    if (request.num_attempts > 1) facts.push(`resumed ${request.num_attempts - 1} times`);
    if (request.num_migrations) facts.push(`migrated ${request.num_migrations} times`);
    if (request.outcome) facts.push(`ended: ${request.outcome}`);
    return facts.join(" · ");
  }
}
