// Composer: the input with its files. What is not sent yet, the draft, is kept in the browser.

import { fileChip, readAttachment } from "./attachment.js";

const DRAFT = "specinfer.draft.";

export class Composer {
  #form;
  #words;
  #chips;
  #notice;
  #files = [];
  #id = "new"; // of the conversation that the draft is for
  #passing = false; // the notice is about the server's state, and ends with it

  // `onsend(text, files)` returns whether the message was taken; `onstop()` is called on Escape.
  constructor(form, { onsend, onstop }) {
    this.#form = form;
    this.#words = form.querySelector("textarea");
    this.#chips = form.querySelector("#files");
    this.#notice = form.querySelector("#notice");
    const picker = form.querySelector("#attachments");
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const written = this.#words.value;
      const text = written.trim();
      if (!text && !this.#files.length) return;
      const files = [...this.#files];
      if (await onsend(text, files)) this.#clear(written, files);
    });
    this.#words.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) onstop();
      // The Enter key of a screen keyboard makes a line.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.#words.addEventListener("input", () => this.#keep());
    this.#words.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      if (!files.length || types.includes("text/plain")) return; // cells of a table come as an image, too
      event.preventDefault();
      this.attach(files);
    });
    form.querySelector("#attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.attach(picker.files);
      picker.value = "";
    });
  }

  // Show the draft for a conversation; null is a new one.
  open(id) {
    this.#id = id ?? "new";
    const { text = "", files = [] } = this.#kept();
    this.#words.value = text;
    this.#files = files;
    this.notice("");
    this.#show();
  }

  async attach(files) {
    this.notice("");
    for (const file of [...files]) {
      try {
        this.#files.push(await readAttachment(file));
      } catch (error) {
        this.notice(error.message);
      }
    }
    this.#keep();
    this.#show();
    this.focus();
  }

  // Put a message back that was not sent, in front of what was written since.
  giveBack(text, files) {
    this.#words.value = [text, this.#words.value].filter(Boolean).join("\n\n");
    this.#files = [...files, ...this.#files];
    this.#keep();
    this.#show();
    this.focus();
  }

  fill(text) {
    this.#words.value = text;
    this.#form.requestSubmit();
  }

  // Remove a sent message; what was written or attached since it was sent stays.
  #clear(written, files) {
    const { value } = this.#words;
    this.#words.value = value.startsWith(written) ? value.slice(written.length).trimStart() : value;
    this.#files = this.#files.filter((file) => !files.includes(file));
    this.notice("");
    this.#keep();
    this.#show();
  }

  // Show a sentence above the input; one that is `passing` until the server answers again.
  notice(text, passing = false) {
    this.#notice.textContent = text;
    this.#notice.hidden = !text;
    this.#passing = passing;
  }

  // The server answers.
  settled() {
    if (this.#passing) this.notice("");
  }

  // The conversation has begun: what is written now is its draft.
  set id(id) {
    if (id === this.#id) return;
    Composer.forget(this.#id);
    this.#id = id;
    this.#keep();
  }

  focus() {
    this.#words.focus();
  }

  // Forget the draft for a conversation that is deleted.
  static forget(id) {
    localStorage.removeItem(DRAFT + id);
  }

  #kept() {
    try {
      return JSON.parse(localStorage.getItem(DRAFT + this.#id)) ?? {};
    } catch {
      return {};
    }
  }

  #keep() {
    const text = this.#words.value;
    const files = this.#files;
    if (!text && !files.length) return Composer.forget(this.#id);
    for (const draft of [{ text, files }, { text }]) {
      try {
        return localStorage.setItem(DRAFT + this.#id, JSON.stringify(draft));
      } catch {
        // The files are larger than the browser keeps: the text alone is kept.
      }
    }
  }

  #show() {
    const chips = this.#files.map((file, index) =>
      fileChip(file, () => {
        this.#files.splice(index, 1);
        this.#keep();
        this.#show();
        this.focus();
      }),
    );
    this.#chips.replaceChildren(...chips);
  }
}
