// A chat whose answer shows, for each token, the worker that made it and when it came.

import * as api from "./api.js";
import { h, setAttr, setText, table } from "./dom.js";
import { duration } from "./format.js";

const MAX_ROWS = 500; // of the table of tokens
const NUM_COLOURS = 6;

/** @typedef {{text: string, worker: string, at: number}} ChatToken `at`: seconds since the router had the request */

export class Chat {
  /** @param {HTMLElement} root @param {import("./store.js").Store} store */
  constructor(root, store) {
    this.store = store;
    /** @type {AbortController | null} */
    this.running = null;
    /** @type {ChatToken[]} */
    this.tokens = [];
    /** @type {string[]} workers of the answer, in the order of their first tokens */
    this.workers = [];
    this.build(root);
  }

  /** @param {HTMLElement} root */
  build(root) {
    this.input = /** @type {HTMLTextAreaElement} */ (h("textarea", { attrs: { id: "chat-input", rows: "2", spellcheck: "false" } }));
    this.input.value = "Tell me a short story.";
    this.limit = /** @type {HTMLInputElement} */ (h("input", { attrs: { id: "chat-limit", type: "number", min: "1", max: "4096" } }));
    this.limit.value = "64";
    this.button = h("button", { class: "main", text: "Send", attrs: { type: "submit" } });
    const label = h("label", { class: "hidden", text: "Message", attrs: { for: "chat-input" } });
    const limit = h("label", { attrs: { for: "chat-limit" }, text: "Tokens at most" });
    const form = h("form", { class: "chat-form" }, label, this.input, h("div", { class: "tools" }, limit, this.limit, this.button));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.answer = h("p", { class: "answer", attrs: { "aria-live": "polite", "aria-busy": "false" } });
    this.summary = h("p", { class: "muted", attrs: { id: "chat-summary" } });
    this.key = h("ul", { class: "legend", attrs: { "aria-label": "Workers of the answer" } });
    const columns = [{ text: "token", number: true }, { text: "text" }, { text: "worker" }, { text: "at", number: true }, { text: "after", number: true }];
    this.table = table("Tokens of the answer", columns);
    const scroll = h("div", { class: "scroll", attrs: { tabindex: "0", role: "region", "aria-label": "Tokens of the answer" } }, this.table.element);
    this.details = h("details", {}, h("summary", { text: "Each token" }), scroll);
    this.details.hidden = true;
    root.append(form, this.answer, this.key, this.summary, this.details);
  }

  async send() {
    this.running = new AbortController();
    this.tokens = [];
    this.workers = [];
    this.answer.replaceChildren();
    this.key.replaceChildren();
    setText(this.summary, "");
    setText(this.button, "Stop");
    setAttr(this.answer, "aria-busy", "true");
    const body = {
      messages: [{ role: "user", content: this.input.value }],
      max_tokens: Number(this.limit.value) || 64,
      stream: true,
      token_origins: true,
    };
    let end = "";
    try {
      for await (const chunk of api.chat(body, this.running.signal)) this.take(chunk);
    } catch (error) {
      end = this.running.signal.aborted ? "stopped" : /** @type {Error} */ (error).message;
    }
    this.running = null;
    setText(this.button, "Send");
    setAttr(this.answer, "aria-busy", "false");
    this.finish(end);
  }

  /** @param {any} chunk */
  take(chunk) {
    const choice = chunk.choices?.[0];
    if (!choice?.origins) return;
    const text = choice.delta.content ?? choice.delta.reasoning ?? "";
    for (const [i, run] of choice.origins.entries()) {
      if (!this.workers.includes(run.worker)) this.addWorker(run.worker);
      // The text of a chunk of several tokens is shown with the last of them.
      for (let k = 0; k < run.num_tokens; k++) {
        const isLast = i === choice.origins.length - 1 && k === run.num_tokens - 1;
        this.add({ text: isLast ? text : "", worker: run.worker, at: choice.elapsed_s });
      }
    }
  }

  /** @param {string} worker */
  addWorker(worker) {
    this.workers.push(worker);
    const colour = `worker-${(this.workers.length - 1) % NUM_COLOURS}`;
    this.key.append(h("li", {}, h("i", { class: `segment ${colour}` }), this.store.nameOf(worker)));
  }

  /** @param {ChatToken} token */
  add(token) {
    const after = this.tokens.length ? token.at - this.tokens[this.tokens.length - 1].at : token.at;
    this.tokens.push(token);
    const span = h("span", { class: `token worker-${this.workers.indexOf(token.worker) % NUM_COLOURS}`, text: token.text });
    span.title = `token ${this.tokens.length}, ${this.store.nameOf(token.worker)}, at ${duration(token.at)}, after ${duration(after)}`;
    this.answer.append(span);
  }

  /** @param {string} end what ended it before its time; empty: nothing */
  finish(end) {
    const { tokens } = this;
    const first = tokens[0]?.at;
    const mean = tokens.length > 1 ? (tokens[tokens.length - 1].at - first) / (tokens.length - 1) : null;
    const facts = tokens.length ? [`${tokens.length} tokens`, `first after ${duration(first)}`] : [];
    if (mean !== null) facts.push(`then one every ${duration(mean)}`);
    if (end) facts.push(end);
    setText(this.summary, facts.join(" · "));
    this.details.hidden = !tokens.length;
    this.table.fill(
      tokens.slice(0, MAX_ROWS).map((token, i) => ({
        key: String(i),
        cells: [
          String(i + 1),
          JSON.stringify(token.text),
          this.store.nameOf(token.worker),
          duration(token.at),
          duration(i ? token.at - tokens[i - 1].at : token.at),
        ],
      })),
    );
  }
}
