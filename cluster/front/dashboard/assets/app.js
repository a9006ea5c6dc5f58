// The dashboard: asks the router for its state twice a second while the page is seen, and shows it.
//
//   poll ──200──> Store ──> the views        304: the same state, later        401: ask for the key

import * as api from "./api.js";
import { Causes } from "./causes.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { byId, setAttr, setText } from "./dom.js";
import { Events } from "./events.js";
import { Requests } from "./requests.js";
import { Store } from "./store.js";
import { Theme } from "./theme.js";
import { Tiles } from "./tiles.js";
import { Workers } from "./workers.js";

const POLL_MS = 500;
const RETRY_MS = 2000;

class App {
  constructor() {
    this.store = new Store();
    this.requests = new Requests(byId("requests"), this.store);
    const charts = new Charts(byId("charts"), this.store);
    const workers = new Workers(byId("workers"), this.store, (id) => this.requests.showWorker(id));
    const others = [new Tiles(byId("tiles"), this.store), new Causes(this.store), new Events(byId("events"), this.store)];
    this.views = [workers, this.requests, charts, ...others];
    new Chat(byId("chat"), this.store);
    new Theme(byId("theme"), () => charts.recolour());
    this.isPaused = false;
    this.timer = 0;
    this.isAsking = false;
    this.dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
    this.bind();
    this.poll();
  }

  bind() {
    const pause = byId("pause");
    pause.addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      pause.setAttribute("aria-pressed", String(this.isPaused));
      pause.textContent = this.isPaused ? "Go on" : "Pause";
      this.requests.isPaused = this.isPaused;
      if (this.isPaused) this.show("paused", "wait");
      else this.poll();
    });
    document.addEventListener("visibilitychange", () => this.poll());
    byId("key").addEventListener("click", () => this.askKey(""));
    byId("key-close").addEventListener("click", () => this.dialog.close());
    byId("key-form").addEventListener("submit", () => {
      const input = /** @type {HTMLInputElement} */ (byId("key-input"));
      api.key.set(input.value.trim());
      api.forget();
      input.value = "";
      this.poll();
    });
  }

  /** Ask once, and again later. Nothing is asked while nobody looks, nor while a key is awaited. */
  async poll() {
    clearTimeout(this.timer);
    if (this.isPaused || document.hidden || this.isAsking) return;
    this.isAsking = true;
    let wait = POLL_MS;
    try {
      const found = await api.snapshot();
      const isOther = this.store.take(found, performance.now());
      this.render(isOther);
    } catch (error) {
      wait = RETRY_MS;
      if (error instanceof api.KeyNeeded) {
        this.isAsking = false;
        this.show("key needed", "bad");
        if (!this.dialog.open) this.askKey(api.key.get() ? "The router does not take this key for its state." : "");
        return;
      }
      this.show("no answer", "bad");
      this.notice(`The router does not answer (${/** @type {Error} */ (error).message}). What is shown is the last state.`);
    }
    this.isAsking = false;
    this.timer = window.setTimeout(() => this.poll(), wait);
  }

  /** @param {boolean} isOther another router has answered than before */
  render(isOther) {
    const snapshot = this.store.snapshot;
    if (!snapshot) return;
    const began = performance.now();
    const router = snapshot.router;
    setText(byId("model"), router.model);
    const shared = router.num_routers > 1 ? `, one of ${router.num_routers}` : "";
    setText(byId("router"), `router ${router.id} on ${router.host}${shared}, version ${router.version}`);
    this.show("live", "good");
    if (isOther) this.notice(`Router ${router.id} answers now: each router shows the requests that it routes itself.`);
    else if (byId("notice").dataset.router !== router.id) this.notice("");
    for (const view of this.views) view.render(snapshot);
    performance.measure("dashboard-update", { start: began });
  }

  /** @param {string} text @param {string} state */
  show(text, state) {
    const badge = byId("link");
    setText(badge, text);
    setAttr(badge, "data-state", state);
  }

  /** @param {string} text */
  notice(text) {
    const element = byId("notice");
    setText(element, text);
    element.hidden = !text;
    element.dataset.router = text ? this.store.snapshot?.router.id ?? "" : "";
  }

  /** @param {string} why */
  askKey(why) {
    if (why) setText(byId("key-why"), why);
    this.dialog.showModal();
  }
}

new App();
