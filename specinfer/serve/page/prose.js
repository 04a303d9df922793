// Prose: Markdown that grows. Only the last block is rendered again, and more seldom the longer that takes.

import { copyButton } from "./clipboard.js";
import { element } from "./dom.js";
import { blocksOf, hasDefinitions, rendered } from "./markdown.js";
import { markWords } from "./marking.js";

const PAUSE = 30; // milliseconds between two renderings, at least
const SHARE = 6; // and at least this many times what the last one took

export class Prose {
  text = "";
  #element;
  #marking; // () => {on, inCode}
  #onrender;
  #marks = [];
  #end = 0; // of the blocks that are final, in the text
  #passed = 0; // marks in front of it
  #rest = ""; // the text behind it
  #last = []; // nodes of the rest
  #code = null; // text node of the rest's code block, and its length in the rest
  #timer = null;
  #took = 0;

  // Renders into `element`; `marking()` says whether tokens are marked, also in code.
  constructor(into, marking, onrender) {
    this.#element = into;
    this.#marking = marking;
    this.#onrender = onrender;
  }

  // Add text; `mark` is its token's {index, token, spans}, or null.
  append(text, mark) {
    text = text.replaceAll("\r", "");
    if (mark) this.#marks.push(Object.assign(mark, { start: this.text.length, end: this.text.length + text.length }));
    this.text += text;
    this.#rest += text;
    this.#timer ??= setTimeout(() => this.#render(false), Math.max(PAUSE, SHARE * this.#took));
  }

  // Render all of the text: no more comes for now.
  finish() {
    if (hasDefinitions(this.text)) this.refresh();
    else if (this.#timer) this.#render(false);
  }

  // Render everything again, after a change of what is marked.
  refresh() {
    for (const mark of this.#marks) mark.spans.length = 0;
    this.#element.replaceChildren();
    [this.#end, this.#passed, this.#rest, this.#last, this.#code] = [0, 0, this.text, [], null];
    this.#render(true);
  }

  #render(afresh) {
    const began = performance.now();
    clearTimeout(this.#timer);
    this.#timer = null;
    const blocks = blocksOf(this.#rest);
    const last = lastOf(blocks);
    const alone = blocks.every(({ type }, index) => index === last || type === "space");
    if (afresh || last > 0 || !alone || !this.#grow(blocks[last])) {
      for (const one of this.#last) one.remove();
      this.#last = [];
      for (const mark of this.#marks.slice(this.#passed)) mark.spans.length = 0;
      let start = this.#end;
      blocks.forEach((block, index) => {
        const made = this.#made(block, start);
        start += block.raw.length;
        if (index < last) this.#settle(block);
        else this.#last.push(...made.childNodes);
        this.#element.append(made);
      });
      const frame = this.#last.find(({ className }) => className === "code");
      this.#code = frame?.querySelector("code").firstChild ?? null;
    }
    this.#took = performance.now() - began;
    this.#onrender();
  }

  // Add to the code block that the rest is; false if it is none, or marked.
  #grow(block) {
    if (!this.#code || block?.type !== "code" || this.#marking().inCode) return false;
    const shown = this.#code.data.replace(/\n$/, "");
    if (!block.text.startsWith(shown)) return false;
    this.#code.replaceData(shown.length, this.#code.length, `${block.text.slice(shown.length)}\n`);
    return true;
  }

  #settle({ raw }) {
    this.#end += raw.length;
    this.#rest = this.#rest.slice(raw.length);
    while (this.#marks[this.#passed]?.end <= this.#end) this.#passed += 1;
  }

  #made(block, start) {
    const fragment = rendered(block);
    const { on, inCode } = this.#marking();
    if (on) markWords(fragment, block.raw, start, this.#marks.slice(this.#passed), inCode);
    for (const code of fragment.querySelectorAll("pre > code")) furnish(code);
    for (const table of fragment.querySelectorAll("table")) {
      const frame = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
      table.replaceWith(frame);
      frame.append(table);
    }
    for (const link of fragment.querySelectorAll("a[href]")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    return fragment;
  }
}

// Index of the first block that more text may change: the last one with text, or the one before it while not
// even its first line is whole.
function lastOf(blocks) {
  const last = blocks.findLastIndex(({ type }) => type !== "space");
  if (last <= 0) return Math.max(last, 0);
  const whole = blocks.slice(last).some(({ raw }) => raw.includes("\n"));
  return whole ? last : blocks.findLastIndex(({ type }, index) => type !== "space" && index < last);
}

// Give a code block its language and a button that copies it.
function furnish(code) {
  const language = code.className.replace(/^language-/, "").slice(0, 24);
  const copy = copyButton("Copy", () => code.textContent.replace(/\n$/, ""), { "aria-label": "Copy code" });
  const head = element("div", { class: "code-head" }, element("span", { text: language || "text" }), copy);
  const block = code.parentElement;
  const frame = element("div", { class: "code" }, head);
  block.replaceWith(frame);
  block.tabIndex = 0;
  frame.append(block);
}
