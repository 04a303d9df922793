// Server: requests to the server of this page.

import { events } from "./event_stream.js";

const KEY = "specinfer.key";

const GONE = "The server does not answer; start it, or try again.";

export class ServerError extends Error {
  // Status 0: there was no answer; `lost`: the connection was lost after the answer had begun.
  constructor(message, status, param = null, lost = false) {
    super(message);
    this.status = status;
    this.param = param;
    this.lost = lost;
  }
}

export class Server {
  // The API key is kept until the tab closes.
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(key) {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  }

  // Cards of the served models.
  async models() {
    const response = await this.#fetch("v1/models", {});
    return (await response.json()).data;
  }

  // Chunks of an answer; aborting `signal` also ends it on the server.
  async *chat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const chunk of received(response)) {
      if (chunk.error) throw new ServerError(chunk.error.message, response.status, chunk.error.param);
      yield chunk;
    }
  }

  async #fetch(path, options) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(GONE, 0);
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    const message = body?.error?.message ?? `The server answered ${response.status}.`;
    throw new ServerError(message, response.status, body?.error?.param ?? null);
  }
}

async function* received(response) {
  try {
    yield* events(response);
  } catch (error) {
    if (error.name === "AbortError" || error instanceof SyntaxError) throw error;
    throw new ServerError(GONE, 0, null, true);
  }
}
