// Note: tooltip of the token under the pointer, or selected by the arrow keys.

import { element } from "./dom.js";
import { percent, visible } from "./step.js";
import { listed, speculators } from "./speculators.js";

const MARGIN = 8; // pixels to the window's edge

export class Note {
  #element;

  constructor(tooltip) {
    this.#element = tooltip;
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    document.addEventListener("scroll", () => this.hide(), true);
  }

  show(answer, token, span) {
    this.#element.replaceChildren(
      element("span", { class: `text ${speculators.mark(token.by)}`, text: visible(token.text) }),
      element("span", { text: guess(token) }),
      element("span", { class: "where", text: where(answer, token) }),
    );
    this.#element.hidden = false;
    const [word] = span.getClientRects();
    if (!word) return this.hide();
    const { width, height } = this.#element.getBoundingClientRect();
    const left = Math.min(Math.max(word.left, MARGIN), innerWidth - width - MARGIN);
    const below = word.bottom + MARGIN;
    const top = below + height < innerHeight ? below : word.top - height - MARGIN;
    this.#element.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  hide() {
    this.#element.hidden = true;
  }
}

// The same as one sentence.
export function described(answer, token) {
  return `${token.text.trim() || visible(token.text)}: ${guess(token)}, ${where(answer, token)}`;
}

function guess(token) {
  if (!token.by.length) return "added by the target";
  const likely = token.likelihood === null ? "" : `, ${percent(token.likelihood)} likely`;
  return `guessed by ${listed(token.by)}${likely}`;
}

function where(answer, token) {
  const step = answer.steps[token.at];
  return `step ${token.at + 1}, token ${step.tokens.indexOf(token) + 1} of ${step.tokens.length}`;
}
