// Live requests and those that have just ended, as waterfalls. A list of any length: only the rows in sight have elements.

import { byId, h, keyed, setAttr, setStyle, setText } from "./dom.js";
import { RequestDetail } from "./detail.js";
import { count, duration } from "./format.js";
import { place, segments, SEGMENTS, ticks } from "./waterfall.js";

const ROW_PX = 26;
const GROW_MS = 100; // between two looks at segments that grow
const FILTERS = ["all", "queue", "prefill", "pull", "decode", "migrate", "ended"];

export class Requests {
  /** @param {HTMLElement} root @param {import("./store.js").Store} store */
  constructor(root, store) {
    this.store = store;
    this.isPaused = false;
    this.filter = "all";
    this.worker = "";
    this.selected = "";
    /** @type {any[][]} rows as the router sent them: only those in sight are looked at */
    this.shown = [];
    this.span = 1;
    /** @type {HTMLElement[]} */
    this.pool = [];
    this.build(root);
    setInterval(() => {
      const grows = !this.isPaused && !document.hidden && this.store.snapshot?.live.length;
      if (grows) requestAnimationFrame(() => this.draw());
    }, GROW_MS);
  }

  /** @param {HTMLElement} root */
  build(root) {
    this.filters = h("div", { class: "chips", attrs: { role: "group", "aria-label": "Phases that are shown" } });
    for (const name of FILTERS) {
      const chip = h("button", { class: "chip", attrs: { type: "button", "data-phase": name } });
      chip.addEventListener("click", () => this.choose(name));
      this.filters.append(chip);
    }
    this.workerChip = h("button", { class: "chip", attrs: { type: "button", title: "Show the requests of all workers" } });
    this.workerChip.addEventListener("click", () => this.showWorker(""));
    this.filters.append(this.workerChip);
    this.axis = h("div", { class: "axis", attrs: { "aria-hidden": "true" } });
    this.space = h("div", { class: "space", attrs: { role: "presentation" } });
    const attrs = { role: "listbox", tabindex: "0", "aria-label": "Requests, newest first. Arrow keys choose one" };
    this.list = h("div", { class: "requests", attrs }, this.space);
    this.list.addEventListener("scroll", () => this.draw(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.list);
    this.legend = h("ul", { class: "legend", attrs: { "aria-label": "Colours" } });
    for (const [name, text] of Object.entries(SEGMENTS)) {
      this.legend.append(h("li", {}, h("i", { class: `segment ${name}` }), text));
    }
    this.legend.append(h("li", {}, h("i", { class: "segment prefill open" }), "not yet known in parts"));
    this.detail = new RequestDetail(this.store);
    root.append(this.filters, this.axis, this.list, this.legend, this.detail.element);
  }

  /** Show the requests of one worker; empty: of all. @param {string} id */
  showWorker(id) {
    this.worker = id === this.worker ? "" : id;
    this.refresh();
    if (id) byId("requests-title").scrollIntoView({ block: "nearest" });
  }

  /** @param {string} filter */
  choose(filter) {
    this.filter = filter;
    this.list.scrollTop = 0;
    this.refresh();
  }

  /** @param {import("./store.js").Snapshot} snapshot */
  render(snapshot) {
    const left = snapshot.num_live - snapshot.live.length;
    setText(byId("requests-count"), `${count(snapshot.num_live)} live${left > 0 ? `, of which the ${left} newest are not shown` : ""}`);
    this.refresh();
  }

  refresh() {
    const snapshot = this.store.snapshot;
    if (!snapshot) return;
    const { column } = this.store;
    const live = [...snapshot.live].reverse();
    this.renderFilters(live, snapshot.ended, column.phase);
    const place = snapshot.names.indexOf(this.worker);
    const rows = (this.filter === "ended" ? snapshot.ended : this.filter === "all" ? [...live, ...snapshot.ended] : live).filter(
      (row) =>
        (this.filter === "all" || row[column.phase] === this.filter) &&
        (!this.worker || (place >= 0 && (row[column.source] === place || row[column.worker] === place))),
    );
    this.shown = rows;
    this.draw();
    const chosen = this.requestAt(this.place());
    if (chosen || !this.selected) this.detail.show(chosen); // one that has left the list stays as it was
  }

  /** @param {any[][]} live @param {any[][]} ended @param {number} phase */
  renderFilters(live, ended, phase) {
    /** @type {Record<string, number>} */
    const numbers = { all: live.length + ended.length, ended: ended.length };
    for (const row of live) numbers[row[phase]] = (numbers[row[phase]] ?? 0) + 1;
    FILTERS.forEach((name, i) => {
      setText(this.filters.children[i], `${name} ${numbers[name] ?? 0}`);
      setAttr(this.filters.children[i], "aria-pressed", String(this.filter === name));
    });
    this.workerChip.hidden = !this.worker;
    setText(this.workerChip, `only ${this.store.nameOf(this.worker)} ×`);
    setAttr(this.workerChip, "aria-pressed", "true");
  }

  /** Request in a row of the list; null: there is none. @param {number} index */
  requestAt(index) {
    const snapshot = this.store.snapshot;
    return snapshot && index >= 0 && index < this.shown.length ? asObject(this.shown[index], this.store.column, snapshot) : null;
  }

  /** Row of the chosen request; -1: it is not in the list. */
  place() {
    return this.selected ? this.shown.findIndex((row) => row[this.store.column.id] === this.selected) : -1;
  }

  /** Put the rows in sight in place. */
  draw() {
    const now = this.store.now();
    const first = Math.max(Math.floor(this.list.scrollTop / ROW_PX) - 2, 0);
    const last = Math.min(Math.ceil((this.list.scrollTop + this.list.clientHeight) / ROW_PX) + 2, this.shown.length);
    const visible = /** @type {Record<string, any>[]} */ ([]);
    for (let i = first; i < last; i++) visible.push(/** @type {any} */ (this.requestAt(i)));
    this.span = Math.max(1, ...visible.map((r) => (r.ended_at ?? now) - r.started_at)) * 1.05;
    setStyle(this.space, "height", `${this.shown.length * ROW_PX}px`);
    setAttr(this.list, "data-empty", this.shown.length ? "" : "No requests. They appear here when they come.");
    while (this.pool.length < visible.length) this.pool.push(makeRow());
    this.pool.forEach((row, i) => {
      if (i >= visible.length) return row.remove();
      if (!row.isConnected) this.space.append(row);
      row.onclick = () => this.select(first + i);
      this.update(row, visible[i], first + i, now);
    });
    const chosen = this.place();
    setAttr(this.list, "aria-activedescendant", chosen >= first && chosen < last ? `request-${chosen - first}` : "");
    this.pool.forEach((row, i) => setAttr(row, "id", `request-${i}`));
    this.drawAxis();
  }

  /** @param {HTMLElement} row @param {Record<string, any>} request @param {number} index @param {number} now */
  update(row, request, index, now) {
    const [phase, id, workers, track, tokens, age] = /** @type {HTMLElement[]} */ ([...row.children]);
    setStyle(row, "transform", `translateY(${index * ROW_PX}px)`);
    setAttr(row, "data-phase", request.phase);
    setAttr(row, "aria-selected", String(request.id === this.selected));
    setAttr(row, "aria-posinset", String(index + 1));
    setAttr(row, "aria-setsize", String(this.shown.length));
    setText(phase, request.outcome ?? request.phase);
    setText(id, request.id);
    setText(workers, routeText(this.store, request));
    setText(tokens, `${request.num_prompt} → ${request.num_output}`);
    setText(age, duration((request.ended_at ?? now) - request.started_at));
    const { sums, beside } = segments(request, now);
    this.fill(/** @type {HTMLElement} */ (track.children[0]), sums);
    this.fill(/** @type {HTMLElement} */ (track.children[1]), beside);
  }

  /** @param {HTMLElement} bar @param {import("./waterfall.js").Segment[]} found */
  fill(bar, found) {
    while (bar.children.length < found.length) bar.append(h("i", { class: "segment" }));
    while (bar.children.length > found.length) bar.lastElementChild?.remove();
    found.forEach((segment, i) => {
      const element = /** @type {HTMLElement} */ (bar.children[i]);
      const from = place(segment.from, this.span);
      setAttr(element, "class", `segment ${segment.name}${segment.isOpen ? " open" : ""}`);
      setStyle(element, "left", `${(from * 100).toFixed(2)}%`);
      setStyle(element, "width", `${((place(segment.to, this.span) - from) * 100).toFixed(2)}%`);
    });
  }

  drawAxis() {
    const make = (/** @type {number} */ s) => h("span", { text: duration(s) });
    keyed(this.axis, ticks(this.span), String, make, (tick, s) => setStyle(tick, "left", `${(place(s, this.span) * 100).toFixed(2)}%`));
  }

  /** @param {number} index */
  select(index) {
    const place = Math.min(Math.max(index, 0), this.shown.length - 1);
    const request = this.requestAt(place);
    if (!request) return;
    this.selected = request.id;
    const top = place * ROW_PX;
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop) this.list.scrollTop = top;
    else if (top + ROW_PX > scrollTop + clientHeight) this.list.scrollTop = top + ROW_PX - clientHeight;
    this.draw();
    this.detail.show(request);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const at = this.place();
    const page = Math.floor(this.list.clientHeight / ROW_PX);
    /** @type {Record<string, number>} */
    const goals = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.shown.length - 1 };
    if (event.key === "Escape") {
      this.selected = "";
      this.refresh();
    } else if (event.key in goals) {
      event.preventDefault();
      this.select(goals[event.key]);
    }
  }
}

function makeRow() {
  const track = h("span", { class: "track" }, h("span", { class: "bar" }), h("span", { class: "bar thin" }));
  const cells = ["phase", "id", "route"].map((name) => h("span", { class: name }));
  return h("div", { class: "request", attrs: { role: "option" } }, ...cells, track, h("span", { class: "tokens" }), h("span", { class: "age" }));
}

/** @param {any[]} row @param {Record<string, number>} column @param {import("./store.js").Snapshot} snapshot */
function asObject(row, column, snapshot) {
  const request = Object.fromEntries(Object.entries(column).map(([name, i]) => [name, row[i]]));
  const name = (/** @type {number | null} */ i) => (i === null ? null : snapshot.names[i]);
  const timings = request.timings && Object.fromEntries(snapshot.phases.map((phase, i) => [phase, request.timings[i]]));
  return { ...request, source: name(request.source), worker: name(request.worker), timings };
}

/** @param {import("./store.js").Store} store @param {Record<string, any>} request */
export function routeText(store, request) {
  if (!request.source) return "no worker yet";
  const source = store.nameOf(request.source);
  return request.worker && request.worker !== request.source ? `${source} → ${store.nameOf(request.worker)}` : source;
}
