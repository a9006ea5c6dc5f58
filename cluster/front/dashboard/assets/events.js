// Last events of workers, and the controller's decisions with their reasons, newest first.

import { h, keyed, setAttr, setText } from "./dom.js";
import { clockTime } from "./format.js";

const MAX_SHOWN = 60;
const SAYS = { up: "is up", down: "has no link", draining: "drains", gone: "is gone", moved: "gave a request" };
const TONES = { up: "good", down: "bad", gone: "", draining: "warn", moved: "" };

export class Events {
  /** @param {HTMLElement} root @param {import("./store.js").Store} store */
  constructor(root, store) {
    this.store = store;
    this.list = h("ol", { class: "events" });
    this.none = h("p", { class: "muted", text: "Nothing yet." });
    root.append(this.none, this.list);
  }

  /** @param {import("./store.js").Snapshot} snapshot */
  render(snapshot) {
    const events = snapshot.events.map((e) => ({
      at: e.at,
      title: `${e.subject} ${SAYS[/** @type {keyof SAYS} */ (e.kind)] ?? e.kind}${e.num > 1 ? ` (${e.num} times)` : ""}`,
      detail: e.detail,
      tone: TONES[/** @type {keyof TONES} */ (e.kind)] ?? "",
    }));
    const decisions = snapshot.decisions.map((d) => ({
      at: d.at,
      title: `${d.subject}: ${d.action}`,
      detail: d.result ? `${d.reason} Result: ${d.result}` : d.reason,
      tone: d.has_failed ? "bad" : "decision",
    }));
    const all = [...events, ...decisions].sort((a, b) => b.at - a.at).slice(0, MAX_SHOWN);
    this.none.hidden = all.length > 0;
    const make = () => h("li", {}, h("time"), h("strong"), h("span", { class: "muted" }));
    keyed(this.list, all, (e) => `${e.title} ${Math.round(e.at)}`, make, (item, e) => {
      setText(item.children[0], clockTime(this.store.now() - e.at));
      setText(item.children[1], e.title);
      setText(item.children[2], e.detail);
      setAttr(item, "data-tone", e.tone);
    });
  }
}
