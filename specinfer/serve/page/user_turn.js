// UserTurn: a message of the user with its files, which can be edited.

import { fileChip } from "./attachment.js";
import { button, element } from "./dom.js";

export class UserTurn {
  #onedit;
  #form = null;
  #content;
  #actions;

  // `record` has role, text and files. `onedit(turn, text)` sends the text in place of this turn and the later
  // ones, and returns whether it could.
  constructor(record, onedit) {
    this.record = record;
    this.#onedit = onedit;
    this.#content = element(
      "div",
      { class: "content" },
      ...record.files.map((file) => fileChip(file)),
      record.text ? element("p", { class: "words", text: record.text }) : null,
    );
    this.#actions = element("div", { class: "actions" }, button("Edit", () => this.#edit(), { class: "edit-button" }));
    this.element = element(
      "article",
      { class: "turn user", "aria-label": "You" },
      element("h2", { class: "visually-hidden", text: "You" }),
      this.#content,
      this.#actions,
    );
  }

  forget() {
    this.element.remove();
  }

  mark() {}

  #edit() {
    const words = element("textarea", { "aria-label": "Your message", rows: "3" });
    words.value = this.record.text;
    const later = this.element.nextElementSibling?.nextElementSibling;
    this.#form = element(
      "form",
      { class: "edit" },
      words,
      element(
        "div",
        { class: "actions" },
        button("Cancel", () => this.#cancel()),
        element("button", { class: "primary", text: "Send" }),
        later ? element("small", { text: "The messages after it are removed." }) : null,
      ),
    );
    this.#form.addEventListener("keydown", (event) => event.key === "Escape" && this.#cancel());
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = words.value.trim();
      if (text || this.record.files.length) this.#onedit(this, text);
    });
    this.#content.hidden = this.#actions.hidden = true;
    this.#content.after(this.#form);
    words.focus();
  }

  #cancel() {
    this.#form.remove();
    this.#content.hidden = this.#actions.hidden = false;
    this.#actions.querySelector("button").focus();
  }
}
