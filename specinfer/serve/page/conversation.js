// Conversation: turns of the user and the model, which can be stopped, continued, regenerated and edited.

import { AnswerTurn } from "./answer_turn.js";
import { withFiles } from "./attachment.js";
import { ServerError } from "./server.js";
import { UserTurn } from "./user_turn.js";

const KEEP = 1000; // milliseconds between two times that an answer in progress is stored
const TITLE = 60; // characters

export class Conversation {
  record = fresh();
  #turns = []; // UserTurn and AnswerTurn
  #page;
  #abort = null; // AbortController of the answer in progress

  // `page` has: element, server, settings, inspector, follow(), announce(text), notice(text), model(),
  // giveBack(text, files), keep(record) and onchange().
  constructor(page) {
    this.#page = page;
  }

  get busy() {
    return this.#abort !== null;
  }

  get empty() {
    return !this.#turns.length;
  }

  // Show a stored conversation, or an empty one.
  open(record = fresh()) {
    this.stop();
    this.#abort = null;
    this.#cut(0);
    this.record = record;
    for (const turn of record.turns) this.#show(turn);
    this.#page.onchange();
    this.#page.follow(true);
  }

  send(text, files = []) {
    const undo = () => {
      this.#drop(this.#turns.length - 2);
      this.#page.giveBack(text, files);
    };
    return this.#ask(text, files, undo);
  }

  stop() {
    this.#abort?.abort();
  }

  mark() {
    for (const turn of this.#turns) turn.mark();
  }

  #ask(text, files, undo) {
    const name = text.split("\n")[0] || files[0].name;
    this.record.title ||= name.length > TITLE ? `${name.slice(0, TITLE - 1)}\u2026` : name;
    this.#add({ role: "user", text, files });
    const turn = this.#add({ role: "assistant", at: 0, versions: [] });
    return this.#run(turn, turn.begin(this.#page.model()), undo);
  }

  #add(record) {
    this.record.turns.push(record);
    return this.#show(record);
  }

  #show(record) {
    const turn =
      record.role === "user"
        ? new UserTurn(record, (...edited) => this.#edit(...edited))
        : new AnswerTurn(record, this.#page, {
            again: (turn) => this.#again(turn),
            resume: (turn) => this.#resume(turn),
            changed: () => this.#keep(),
          });
    this.#turns.push(turn);
    this.#page.element.append(turn.element);
    return turn;
  }

  // Send another text in place of a turn and the later ones; a refusal brings them back.
  #edit(turn, text) {
    if (this.busy || !this.#ready()) return;
    const before = [...this.record.turns];
    this.#drop(this.#turns.indexOf(turn));
    this.#page.focus();
    this.#ask(text, turn.record.files, () => {
      this.#drop(0);
      for (const record of before) this.#add(record);
      this.#page.giveBack(text, turn.record.files);
    });
  }

  #again(turn) {
    if (this.busy || !this.#ready()) return;
    this.#page.focus();
    this.#run(turn, turn.begin(this.#page.model()), () => turn.drop());
  }

  #resume(turn) {
    if (this.busy || !this.#ready()) return;
    const { answer } = turn;
    const { reason, error } = answer.version;
    this.#page.focus();
    answer.resume();
    this.#run(turn, answer, () => answer.finish({ reason, error }), true);
  }

  #ready() {
    if (this.#page.settings.valid) return true;
    this.#page.settings.open();
    return false;
  }

  #cut(index) {
    for (const turn of this.#turns.splice(index)) turn.forget();
  }

  #drop(index) {
    this.#cut(index);
    this.record.turns.length = index;
  }

  // Messages in front of a turn; with `begun`, the turn's own text comes last, to be continued.
  #messages(turn, begun) {
    const { system } = this.#page.settings;
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { record, answer } of this.#turns.slice(0, this.#turns.indexOf(turn))) {
      const { role } = record;
      const content = answer ? answer.version.text : withFiles(record.text, record.files);
      const last = messages.at(-1);
      if (last?.role === role) last.content += `\n\n${content}`; // many templates need other roles in turn
      else if (content) messages.push({ role, content });
    }
    if (begun) messages.push(continued(turn.answer.version));
    return messages;
  }

  // Ask for the answer of a turn. `undo()` is called if the server refuses before it gives any text.
  async #run(turn, answer, undo, begun = false) {
    const body = {
      model: this.#page.model(),
      messages: this.#messages(turn, begun),
      ...(begun ? { continue_final_message: true, add_generation_prompt: false } : {}),
      stream: true,
      stream_options: { include_usage: true },
      trace: true,
      ...this.#page.settings.fields,
    };
    const abort = (this.#abort = new AbortController());
    const { record } = this;
    const end = { reason: "lost" };
    let kept = performance.now();
    let received = false;
    let failure = null;
    this.#page.notice("");
    this.#keep(record); // a reload keeps the prompt
    this.#page.onchange();
    this.#page.follow(true);
    try {
      for await (const chunk of this.#page.server.chat(body, abort.signal)) {
        for (const { trees, delta, finish_reason: reason } of chunk.choices) {
          answer.add(trees ?? []);
          answer.delta(delta);
          received ||= Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
          end.reason = reason ?? end.reason;
        }
        if (chunk.usage) end.usage = chunk.usage;
        if (chunk.metrics) end.speculation = chunk.metrics.speculative_decoding;
        if (performance.now() - kept > KEEP) {
          kept = performance.now();
          this.#keep(record);
        }
      }
    } catch (error) {
      if (abort.signal.aborted) end.reason = "stopped";
      else failure = error;
    }
    const shown = this.record === record; // false if another conversation was opened
    if (this.#abort === abort) this.#abort = null;
    if (failure && !received && shown) {
      undo();
      this.#page.notice(this.#said(failure), failure.status === 0);
    } else {
      if (failure && !failure.lost) end.error = this.#said(failure);
      answer.finish(end);
      turn.update();
      if (shown) this.#page.announce(answer.summary);
    }
    if (failure?.status === 0) this.#page.gone();
    this.#keep(record);
    if (!shown) return;
    this.#page.onchange();
    this.#page.follow();
  }

  // Store a conversation; one without turns is forgotten.
  #keep(record = this.record) {
    if (!record.turns.length) record.title = "";
    record.updated = Date.now();
    this.#page.keep(record);
  }

  #said(error) {
    if (!(error instanceof ServerError)) {
      console.error(error);
      return `The answer cannot be shown: ${error.message}`;
    }
    if (error.param) this.#page.settings.complain(error.param);
    if (error.status === 401) {
      this.#page.settings.open("key");
      return "The server requires an API key; enter it in the settings.";
    }
    return error.status ? `The server refused the request: ${error.message}` : error.message;
  }
}

function fresh() {
  // The page may have no crypto.randomUUID: it needs HTTPS or localhost.
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return { id, title: "", created: Date.now(), updated: Date.now(), turns: [] };
}

// The message that a request continues. Reasoning without a text is still open.
function continued({ text, reasoning }) {
  if (!text) return { role: "assistant", content: `<think>\n${reasoning}` };
  return { role: "assistant", content: text, ...(reasoning ? { reasoning_content: reasoning } : {}) };
}
