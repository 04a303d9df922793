// AnswerTurn: the versions of an answer, of which one is shown, and the buttons below it.

import { Answer } from "./answer.js";
import { copyButton } from "./clipboard.js";
import { button, element } from "./dom.js";
import { saveTrace } from "./trace_file.js";

export class AnswerTurn {
  element = element("div", { class: "versions" });
  #page;
  #acts;
  #answers = []; // Answer of each version that was shown
  #buttons = new Map(); // Answer -> its buttons

  // `record` has role, versions and at, the shown one. `acts` has again(turn), resume(turn) and changed().
  constructor(record, page, acts) {
    this.record = record;
    this.#page = page;
    this.#acts = acts;
    if (record.versions.length) this.#show(record.at);
  }

  // The shown answer.
  get answer() {
    return this.#answers[this.record.at];
  }

  // Begin a new version and show it.
  begin(model) {
    const version = { model, text: "", reasoning: "", calls: [], reason: null, error: null, figures: null };
    this.record.versions.push(version);
    this.#answers[this.record.versions.length - 1] = this.#made(version);
    this.#show(this.record.versions.length - 1);
    return this.answer;
  }

  // Remove the newest version and show the one before it; returns whether there is one.
  drop() {
    this.record.versions.pop();
    this.#page.inspector.forget(this.#answers.pop());
    if (!this.record.versions.length) return false;
    this.#show(this.record.versions.length - 1);
    return true;
  }

  // Show the buttons that fit the answer.
  update() {
    const { resume, save, pager, place, previous, next } = this.#buttons.get(this.answer);
    const { at, versions } = this.record;
    resume.hidden = !this.answer.isOpen;
    save.hidden = !this.answer.steps.length;
    pager.hidden = versions.length < 2;
    place.textContent = `${at + 1} / ${versions.length}`;
    previous.disabled = at === 0;
    next.disabled = at === versions.length - 1;
  }

  forget() {
    for (const answer of this.#answers) if (answer) this.#page.inspector.forget(answer);
    this.element.remove();
  }

  // Apply a change of what is marked.
  mark() {
    for (const answer of this.#answers) answer?.mark();
  }

  #show(index) {
    if (this.answer) this.#page.inspector.forget(this.answer);
    this.record.at = index;
    if (!this.#answers[index]) {
      this.#answers[index] = this.#made(this.record.versions[index]);
      this.answer.restore();
    }
    this.element.replaceChildren(this.answer.element);
    this.update();
  }

  #turn(by) {
    const name = by < 0 ? "previous" : "next";
    this.#show(this.record.at + by);
    const buttons = this.#buttons.get(this.answer);
    (buttons[name].disabled ? buttons[by < 0 ? "next" : "previous"] : buttons[name]).focus();
    this.#page.announce(`Version ${this.record.at + 1} of ${this.record.versions.length}`);
    this.#acts.changed();
  }

  #made(version) {
    const copy = copyButton("Copy", () => version.text);
    const again = button("Regenerate", () => this.#acts.again(this), { class: "again" });
    const resume = button("Continue", () => this.#acts.resume(this), { class: "resume" });
    const save = button("Save trace", () => saveTrace(answer, "trace.jsonl"), { class: "save" });
    const place = element("span", { class: "place" });
    const previous = button("\u2039", () => this.#turn(-1), { "aria-label": "Previous version" });
    const next = button("\u203a", () => this.#turn(1), { "aria-label": "Next version" });
    const pager = element("span", { class: "pager", role: "group", "aria-label": "Versions" }, previous, place, next);
    const actions = [pager, copy, again, resume, save];
    const answer = new Answer(version.model, this.#page, { version, actions });
    this.#buttons.set(answer, { resume, save, pager, place, previous, next });
    return answer;
  }
}
