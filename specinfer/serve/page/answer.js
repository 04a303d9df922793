// Answer: a streamed text of tokens, with its trees and figures.

import { button, element } from "./dom.js";
import { Figures } from "./figures.js";
import { described } from "./note.js";
import { Step, plural } from "./step.js";
import { speculators } from "./speculators.js";
import { StripChart } from "./strip_chart.js";
import { TokenText } from "./token_text.js";

const ENDS = {
  length: "Stopped at the token limit.",
  abort: "The answer was stopped.",
  stopped: "You stopped the answer.",
  content_filter: "The answer was filtered.",
};

export class Answer {
  steps = [];
  marks = []; // {span, token} of every visible token, in order
  text = "";
  finished = false;
  onstep = null; // called after each new step
  #aligned = new TokenText((text, token, channel) => this.#place(text, token, channel));
  #byStep = []; // the same, by step
  #body;
  #before; // container of the reasoning, before the text
  #reasoning = null;
  #calls = new Map();
  #end = element("p", { class: "end", hidden: true });
  #at = 0; // index of the mark that the arrow keys selected

  // `page` has note, announce, inspect(answer, index, from); `actions` are buttons for the finished answer.
  constructor(label, page, { timed, actions = [] }) {
    this.page = page;
    this.figures = new Figures({ timed });
    this.strip = new StripChart((index) => page.inspect(this, index, this.#body));
    this.#body = element("div", {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": "Answer. Arrow keys select a token, Enter shows its step.",
      onkeydown: (event) => this.#keyed(event),
      onpointerover: (event) => this.#over(event),
      onpointerout: () => page.note.hide(),
      onblur: () => this.#deselect(),
      onclick: (event) => this.#clicked(event),
    });
    this.inspect = button("Inspect steps", () => page.inspect(this, this.#firstTree(), this.inspect));
    this.actions = element("div", { class: "actions" }, this.inspect, ...actions);
    this.#before = element("div", { class: "before" });
    this.strip.element.hidden = true;
    this.element = element(
      "article",
      { class: "turn answer", "aria-busy": "true", "aria-label": "Answer" },
      element("h2", { class: "who", text: label }),
      element("div", { class: "content" }, this.#before, this.#body, this.#end, this.strip.element, this.actions),
      this.figures.element,
    );
    this.inspect.hidden = true;
  }

  // Add trees from the server or a file; raises Error for an invalid tree.
  add(trees) {
    for (const tree of trees) {
      const step = new Step(tree);
      for (const token of step.tokens) token.at = this.steps.length;
      this.steps.push(step);
      this.figures.add(step);
      this.strip.add(step);
      this.#aligned.tokens(step.tokens);
    }
    if (this.steps.length) this.inspect.hidden = this.strip.element.hidden = false;
    if (trees.length) this.onstep?.();
  }

  // Add the delta of a chunk.
  delta({ content, reasoning_content: reasoning, tool_calls: calls }) {
    if (reasoning) this.#aligned.text(reasoning, "reasoning");
    if (content) this.#aligned.text(content, "content");
    if (calls) {
      this.#aligned.skip();
      for (const call of calls) this.#call(call);
    }
  }

  // Show the tokens' own texts: a trace has no other text.
  placeTokens() {
    this.#aligned.placeAll();
  }

  finish({ reason = null, usage = null, speculation = null, error = null } = {}) {
    this.#aligned.skip();
    this.finished = true;
    this.element.setAttribute("aria-busy", "false");
    this.figures.finish(usage, speculation);
    this.#end.textContent = error ?? ENDS[reason] ?? "";
    this.#end.hidden = !this.#end.textContent;
    this.#end.classList.toggle("error", Boolean(error));
    if (error) this.#end.setAttribute("role", "alert");
    const steps = this.steps.map((step) => step.tokens.length);
    if (steps.length)
      this.strip.element.setAttribute(
        "aria-label",
        `Tokens per step: ${plural(steps.length, "step")}, at most ${plural(Math.max(...steps), "token")}`,
      );
    this.strip.element.setAttribute("role", "img");
    this.onstep?.();
  }

  // Marks of a step's tokens.
  marksOf(index) {
    return this.#byStep[index] ?? [];
  }

  // Announcement for screen readers when the answer is complete.
  get summary() {
    if (!this.#end.hidden && this.#end.classList.contains("error")) return "";
    return `Answer finished: ${this.figures.tokens} tokens, ${this.figures.tokensPerStep} tokens per step.`;
  }

  #firstTree() {
    return Math.max(0, this.steps.findIndex((step) => step.guesses));
  }

  #place(text, token, channel) {
    const into = channel === "reasoning" ? this.#reasoningBody() : this.#body;
    if (channel === "content") this.text += text;
    if (!token) {
      into.append(text);
      return;
    }
    // The space before a word has no underline, which would show at the ends of lines.
    const word = text.trimStart() || text;
    const span = element("span", { class: `token ${speculators.mark(token.by)}`, text: word });
    span.mark = this.marks.length;
    const mark = { span, token };
    this.marks.push(mark);
    (this.#byStep[token.at] ??= []).push(mark);
    into.append(text.slice(0, text.length - word.length), span);
  }

  #reasoningBody() {
    if (!this.#reasoning) {
      this.#reasoning = element("div", {
        class: "tokens",
        onpointerover: (event) => this.#over(event),
        onpointerout: () => this.page.note.hide(),
        onclick: (event) => this.#clicked(event),
      });
      const fold = element("details", { class: "reasoning" }, element("summary", { text: "Reasoning" }));
      fold.append(this.#reasoning);
      this.#before.append(fold);
    }
    return this.#reasoning;
  }

  #call({ index = 0, function: called = {} }) {
    if (!this.#calls.has(index)) {
      const name = element("code", { class: "name" });
      const given = element("code", { class: "arguments" });
      this.#calls.set(index, { name, given });
      this.#end.before(element("p", { class: "call" }, "Tool call: ", name, " ", given));
    }
    const { name, given } = this.#calls.get(index);
    name.append(called.name ?? "");
    given.append(called.arguments ?? "");
  }

  #over(event) {
    const mark = this.marks[event.target.mark];
    if (mark) this.page.note.show(this, mark);
  }

  #clicked(event) {
    const mark = this.marks[event.target.mark];
    if (!mark || !getSelection().isCollapsed) return;
    this.#go(event.target.mark);
    this.page.inspect(this, mark.token.at, this.#body);
  }

  #keyed(event) {
    const to = {
      ArrowRight: this.#at + 1,
      ArrowLeft: this.#at - 1,
      Home: 0,
      End: this.marks.length - 1,
    }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !this.marks.length) return;
    if (event.key === "Enter") this.page.inspect(this, this.marks[this.#at].token.at, this.#body);
    else if (to === undefined) return;
    else {
      this.#go(Math.min(Math.max(to, 0), this.marks.length - 1));
      const mark = this.marks[this.#at];
      mark.span.scrollIntoView({ block: "nearest" });
      this.page.note.show(this, mark);
      this.page.announce(described(this, mark.token));
    }
    event.preventDefault();
  }

  #go(at) {
    this.marks[this.#at]?.span.classList.remove("at");
    this.#at = at;
    this.marks[at].span.classList.add("at");
  }

  #deselect() {
    this.marks[this.#at]?.span.classList.remove("at");
    this.page.note.hide();
  }
}
