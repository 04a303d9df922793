// PlainText: the tokens of a trace as they are, each in a span.

import { markSpan } from "./marking.js";

export class PlainText {
  #element;

  constructor(into) {
    this.#element = into;
  }

  append(text, mark) {
    // The space before a word has no underline, which would show at the ends of lines.
    const word = text.trimStart() || text;
    this.#element.append(text.slice(0, text.length - word.length), mark ? markSpan(mark, word) : word);
  }

  finish() {}

  refresh() {}
}
