// Figures next to an answer: tokens per step, tokens per second, and accepted guesses of each speculator.

import { element } from "./dom.js";
import { speculators } from "./speculators.js";

export class Figures {
  #values = {};
  #legend = element("ul", { class: "legend", role: "list", "aria-label": "Sources of the tokens" });
  #timed; // false: the times are a trace's
  #counts = new Map(); // speculator -> {accepted, proposed}; "" is the target
  #rows = new Map();
  #steps = 0;
  #tokens = 0; // since the first step, which only reads the prompt
  #seconds = 0; // sum of the times of steps
  #first = null; // time of the first step
  #start = performance.now();
  #before = 0; // tokens of the requests that this one continues

  constructor({ timed }) {
    this.#timed = timed;
    const list = element("dl", { class: "numbers" });
    const names = { rate: "tokens per step", speed: timed ? "tokens/s" : "ms per step", tokens: "tokens" };
    for (const [name, caption] of Object.entries(names)) {
      this.#values[name] = element("dd", { class: `figure-${name}`, text: "\u2013" });
      list.append(element("div", {}, element("dt", { text: caption }), this.#values[name]));
    }
    this.element = element("aside", { class: "figures", "aria-label": "Figures", hidden: true }, list, this.#legend);
  }

  add(step) {
    const now = performance.now();
    this.#first ??= now;
    if (this.#steps) {
      this.#tokens += step.tokens.length;
      this.#seconds += step.total;
    }
    this.#steps += 1;
    for (const { by } of step.nodes.slice(1)) for (const name of by) this.#count(name).proposed += 1;
    for (const { by } of step.tokens) for (const name of by.length ? by : [""]) this.#count(name).accepted += 1;
    this.#show(now);
  }

  // Replace the figures by the server's own if there are any.
  finish(usage, speculation) {
    const now = performance.now();
    const tokens = usage?.completion_tokens;
    if (speculation?.mean_acceptance_length) this.#set("rate", speculation.mean_acceptance_length.toFixed(2));
    if (tokens === undefined) return;
    this.#set("tokens", this.#before + tokens);
    if (this.#first !== null && tokens > 1 && now > this.#first)
      this.#set("speed", round((1000 * (tokens - 1)) / (now - this.#first)));
    if (this.#first !== null)
      this.element.title = `Time to first token: ${((this.#first - this.#start) / 1000).toFixed(2)} s`;
  }

  // Begin to count another request, which continues the text.
  resume() {
    this.#before = Number(this.tokens) || 0;
    [this.#steps, this.#tokens, this.#first, this.#start] = [0, 0, null, performance.now()];
  }

  // The shown values, for `restore`; null if there are none.
  get saved() {
    if (this.element.hidden) return null;
    return Object.fromEntries(Object.entries(this.#values).map(([name, { textContent }]) => [name, textContent]));
  }

  restore(saved) {
    for (const name of Object.keys(this.#values)) if (saved?.[name]) this.#set(name, saved[name]);
  }

  get tokensPerStep() {
    return this.#values.rate.textContent;
  }

  get tokens() {
    return this.#values.tokens.textContent;
  }

  #show(now) {
    const steps = this.#steps - 1;
    this.#set("tokens", this.#before + this.#tokens + 1);
    if (steps) this.#set("rate", (this.#tokens / steps).toFixed(2));
    if (!this.#timed) {
      if (steps && this.#seconds) this.#set("speed", round((1000 * this.#seconds) / steps));
    } else if (now - this.#first > 250) this.#set("speed", round((1000 * this.#tokens) / (now - this.#first)));
    for (const [name, { row }] of this.#rows) {
      const { accepted, proposed } = this.#counts.get(name);
      row.textContent = name ? `${accepted} of ${proposed}` : `${accepted}`;
    }
  }

  #set(name, value) {
    this.element.hidden = false;
    this.#values[name].textContent = value;
  }

  #count(name) {
    if (!this.#counts.has(name)) {
      this.#counts.set(name, { accepted: 0, proposed: 0 });
      const row = element("span", { class: "count" });
      const sample = name ? speculators.letter(name) : "T";
      const item = element(
        "li",
        { title: name ? `Accepted guesses of ${name}, out of all of its guesses` : "Tokens that the target added" },
        element("span", { class: `sample ${speculators.mark(name ? [name] : [])}`, text: `${sample}\u00a0\u00a0`, "aria-hidden": "true" }),
        element("span", { text: name || "target" }),
        row,
      );
      this.#rows.set(name, { row, item });
      if (name) this.#legend.insertBefore(item, this.#rows.get("")?.item ?? null);
      else this.#legend.append(item);
    }
    return this.#counts.get(name);
  }
}

function round(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}
