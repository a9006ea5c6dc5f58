// Calls of the router, by URLs relative to the page, so that it works under any path. The key is kept in this tab alone.

const KEY = "diptych.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  /** @param {string} value */
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Thrown where the key is missing, wrong, or not the operator's. */
export class KeyNeeded extends Error {}

/** @returns {Record<string, string>} */
export function withKey() {
  return key.get() ? { authorization: `Bearer ${key.get()}` } : {};
}

let tag = "";

/**
 * Newest snapshot of the router; null where nothing has changed since the last call.
 * @returns {Promise<import("./store.js").Snapshot | null>}
 */
export async function snapshot() {
  const headers = withKey();
  if (tag) headers["if-none-match"] = tag;
  const answer = await fetch("dashboard/data", { headers, cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (answer.status === 304) return null;
  if (answer.status === 401) throw new KeyNeeded();
  if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
  tag = answer.headers.get("etag") ?? "";
  return answer.json();
}

/** Forget what was read, so that the next snapshot is a whole one. */
export function forget() {
  tag = "";
}

/**
 * Send a chat, and yield the JSON of each chunk of its stream.
 * @param {object} body @param {AbortSignal} signal
 */
export async function* chat(body, signal) {
  const headers = { "content-type": "application/json", ...withKey() };
  const answer = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok || !answer.body) throw new Error(await messageOf(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) {
      const data = event.startsWith("data: ") ? event.slice(6) : "";
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/** @param {Response} answer */
async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the router answered ${answer.status}`;
  }
}
