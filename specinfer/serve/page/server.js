// Server: what this page asks of the server it came from.

import { events } from "./event_stream.js";

const KEY = "specinfer.key";

export class ServerError extends Error {
  constructor(message, status, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export class Server {
  // The key lives as long as the tab.
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(key) {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  }

  // The cards of the models that are served.
  async models() {
    const response = await this.#ask("v1/models", {});
    return (await response.json()).data;
  }

  // The chunks of an answer; aborting `signal` ends it, here and there.
  async *chat(body, signal) {
    const response = await this.#ask("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new ServerError(chunk.error.message, response.status, chunk.error.param);
      yield chunk;
    }
  }

  async #ask(path, options) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached.", 0, null);
    }
    if (response.ok) return response;
    const told = await response.json().catch(() => null);
    const message = told?.error?.message ?? `The server answered ${response.status}.`;
    throw new ServerError(message, response.status, told?.error?.param ?? null);
  }
}
