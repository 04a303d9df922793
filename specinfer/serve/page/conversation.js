// Conversation: turns of the user and the model, which can be stopped, regenerated and edited.

import { Answer } from "./answer.js";
import { button, element } from "./dom.js";
import { ServerError } from "./server.js";
import { saveTrace } from "./trace_file.js";

export class Conversation {
  #turns = []; // {text, element} for the user, {answer} for the model
  #page;
  #abort = null; // AbortController of the answer in progress

  // `page` has: element, server, settings, inspector, follow(), announce(text), model(), onchange().
  constructor(page) {
    this.#page = page;
  }

  get busy() {
    return this.#abort !== null;
  }

  get empty() {
    return !this.#turns.length;
  }

  async send(text) {
    this.#add(text);
    await this.#answer();
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#cut(0);
  }

  #add(text) {
    const turn = { text };
    turn.words = element("p", { class: "words", text });
    turn.edit = button("Edit", () => this.#edit(turn));
    turn.content = element("div", { class: "content" }, turn.words);
    turn.element = element(
      "article",
      { class: "turn user", "aria-label": "You" },
      element("h2", { class: "who", text: "You" }),
      turn.content,
      element("div", { class: "actions" }, turn.edit),
    );
    this.#turns.push(turn);
    this.#page.element.append(turn.element);
    this.#page.onchange();
  }

  // Edit a turn; sending it drops the later turns.
  #edit(turn) {
    if (turn.form) return;
    const words = element("textarea", { "aria-label": "Your message", rows: "3" });
    words.value = turn.text;
    const cancel = () => {
      turn.form.remove();
      turn.form = null;
      turn.content.hidden = turn.edit.hidden = false;
      turn.edit.focus();
    };
    turn.form = element(
      "form",
      { class: "edit content" },
      words,
      element("div", { class: "actions" }, element("button", { text: "Send" }), button("Cancel", cancel)),
    );
    turn.form.addEventListener("keydown", (event) => event.key === "Escape" && cancel());
    turn.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = words.value.trim();
      if (!text || !this.#ready()) return;
      this.stop();
      this.#cut(this.#turns.indexOf(turn));
      this.#page.focus();
      this.send(text);
    });
    turn.content.hidden = turn.edit.hidden = true;
    turn.content.after(turn.form);
    words.focus();
  }

  #again(answer) {
    if (this.busy || !this.#ready()) return;
    this.#cut(this.#turns.findIndex((turn) => turn.answer === answer));
    this.#page.focus();
    this.#answer();
  }

  #ready() {
    if (this.#page.settings.valid) return true;
    this.#page.settings.open();
    return false;
  }

  #cut(index) {
    for (const turn of this.#turns.splice(index)) {
      if (turn.answer) this.#page.inspector.forget(turn.answer);
      (turn.answer ?? turn).element.remove();
    }
    this.#page.onchange();
  }

  #messages() {
    const { system } = this.#page.settings;
    const messages = this.#turns
      .map(({ text, answer }) => ({ role: answer ? "assistant" : "user", content: answer ? answer.text : text }))
      .filter(({ content }) => content);
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }

  async #answer() {
    const model = this.#page.model();
    const body = {
      model,
      messages: this.#messages(),
      stream: true,
      stream_options: { include_usage: true },
      trace: true,
      ...this.#page.settings.fields,
    };
    const copy = button("Copy", () => navigator.clipboard.writeText(answer.text).then(() => this.#page.announce("Copied.")));
    const again = button("Regenerate", () => this.#again(answer));
    const save = button("Save trace", () => saveTrace(answer, "trace.jsonl"));
    const answer = new Answer(model, this.#page, { timed: true, actions: [again, copy, save] });
    this.#turns.push({ answer });
    this.#page.element.append(answer.element);
    const abort = (this.#abort = new AbortController());
    this.#page.onchange();
    this.#page.follow(true);
    const end = {};
    try {
      for await (const chunk of this.#page.server.chat(body, abort.signal)) {
        for (const choice of chunk.choices) {
          answer.add(choice.trees ?? []);
          answer.delta(choice.delta);
          end.reason = choice.finish_reason ?? end.reason;
        }
        if (chunk.usage) end.usage = chunk.usage;
        if (chunk.metrics) end.speculation = chunk.metrics.speculative_decoding;
        this.#page.follow();
      }
    } catch (error) {
      if (abort.signal.aborted) end.reason = "stopped";
      else end.error = this.#message(error);
    }
    if (this.#abort === abort) this.#abort = null;
    save.hidden = !answer.steps.length;
    answer.finish(end);
    this.#page.onchange();
    this.#page.follow();
    if (answer.element.isConnected) this.#page.announce(answer.summary);
  }

  #message(error) {
    if (!(error instanceof ServerError)) {
      console.error(error);
      return `The answer cannot be shown: ${error.message}`;
    }
    if (error.param) this.#page.settings.complain(error.param);
    if (error.status === 401) {
      this.#page.settings.open("key");
      return "The server requires an API key; enter it in the settings.";
    }
    return `The server refused the request: ${error.message}`;
  }
}
