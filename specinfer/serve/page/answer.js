// Answer: a streamed text of tokens, with its trees and figures.

import { button, element } from "./dom.js";
import { Figures } from "./figures.js";
import { described } from "./note.js";
import { PlainText } from "./plain_text.js";
import { Prose } from "./prose.js";
import { Step, plural } from "./step.js";
import { StripChart } from "./strip_chart.js";
import { TokenText } from "./token_text.js";

const ENDS = {
  length: "The answer met its limit of tokens.",
  abort: "The server stopped the answer.",
  stopped: "You stopped the answer.",
  lost: "The connection to the server was lost before the answer was complete.",
  closed: "The page was closed before the answer was complete.",
  content_filter: "The answer was filtered.",
};
const OPEN = ["length", "abort", "stopped", "lost", "closed"]; // ends after which an answer can go on
const LABEL = "Answer";
const KEYS = "Answer. Arrow keys select a token, Enter shows its step.";

export class Answer {
  steps = [];
  marks = []; // {index, token, spans} of every token with text, in order
  finished = false;
  onstep = null; // called after each new step and each rendering
  #page;
  #aligned = new TokenText((text, token, channel) => this.#place(text, token, channel));
  #byStep = []; // the marks, by step
  #body;
  #texts = {}; // Prose or PlainText of each channel
  #plain;
  #before = element("div", { class: "before" }); // container of the reasoning, before the text
  #calls = [];
  #end = element("p", { class: "end", hidden: true });
  #at = 0; // index of the mark that the arrow keys selected
  #inspected = false;
  #marked = null; // what is marked now

  // `page` has note, announce, follow, marking() and inspect(answer, index, from). `version` keeps the answer's
  // text and end; without one it is a trace's and has no other text than its tokens. `actions` are buttons.
  constructor(label, page, { version = null, actions = [] } = {}) {
    this.#page = page;
    this.#plain = version === null;
    this.version = version ?? {};
    this.figures = new Figures({ timed: !this.#plain });
    this.strip = new StripChart((index) => page.inspect(this, index, this.#body));
    this.#body = this.#container({ onkeydown: (event) => this.#keyed(event), onblur: () => this.#deselect() });
    this.inspect = button("Inspect steps", () => page.inspect(this, this.#firstTree(), this.inspect));
    this.inspect.hidden = this.strip.element.hidden = true;
    this.actions = element("div", { class: "actions" }, ...actions, this.inspect);
    this.element = element(
      "article",
      { class: "turn answer", "aria-busy": "true", "aria-label": LABEL },
      element("h2", { class: "who", text: label }),
      element("div", { class: "content" }, this.#before, this.#body, this.#end, this.strip.element),
      element("footer", {}, this.actions, this.figures.element),
    );
    this.#texts.content = this.#made(this.#body);
    this.mark();
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
    if (reasoning) {
      this.version.reasoning += reasoning;
      this.#aligned.text(reasoning, "reasoning");
    }
    if (content) {
      this.version.text += content;
      this.#aligned.text(content, "content");
    }
    if (calls) {
      this.#aligned.skip();
      for (const call of calls) this.#call(call);
    }
  }

  // Show the tokens' own texts: a trace has no other text.
  placeTokens() {
    this.#aligned.placeAll();
  }

  // Show the version, which was kept.
  restore() {
    const { text, reasoning, calls, figures, reason, error } = this.version;
    if (reasoning) this.#text("reasoning").append(reasoning, null);
    if (text) this.#text("content").append(text, null);
    this.version.calls = [];
    calls.forEach((call, index) => this.#call({ index, function: call }));
    this.figures.restore(figures);
    this.finish({ reason: reason ?? "closed", error });
  }

  // Begin to add the text of another request, which continues this one.
  resume() {
    this.figures.resume();
    this.finished = false;
    this.#end.hidden = true;
    Object.assign(this.version, { reason: null, error: null });
    this.element.setAttribute("aria-busy", "true");
  }

  finish({ reason = null, usage = null, speculation = null, error = null } = {}) {
    this.#aligned.skip();
    for (const text of Object.values(this.#texts)) text.finish();
    this.finished = true;
    this.element.setAttribute("aria-busy", "false");
    this.figures.finish(usage, speculation);
    Object.assign(this.version, { reason, error, figures: this.figures.saved });
    this.#end.textContent = error ?? ENDS[reason] ?? "";
    this.#end.hidden = !this.#end.textContent;
    this.#end.classList.toggle("error", Boolean(error));
    if (error) this.#end.setAttribute("role", "alert");
    else this.#end.removeAttribute("role");
    const steps = this.steps.map((step) => step.tokens.length);
    if (steps.length)
      this.strip.element.setAttribute(
        "aria-label",
        `Tokens per step: ${plural(steps.length, "step")}, at most ${plural(Math.max(...steps), "token")}`,
      );
    this.strip.element.setAttribute("role", "img");
    this.onstep?.();
  }

  // Whether a request can continue the text.
  get isOpen() {
    const { text, reasoning, calls, reason, error } = this.version;
    return Boolean(text || reasoning) && !calls.length && (Boolean(error) || OPEN.includes(reason));
  }

  get empty() {
    return !this.version.text && !this.version.reasoning && !this.version.calls.length && !this.steps.length;
  }

  // Show or hide the marks of tokens, as the page or the inspector asks for.
  mark(inspected = this.#inspected) {
    this.#inspected = inspected;
    if (this.#isMarked) this.#body.tabIndex = 0;
    else this.#body.removeAttribute("tabindex");
    this.#body.setAttribute("role", "group");
    this.#body.setAttribute("aria-label", this.#isMarked ? KEYS : "Text");
    const marked = this.#isMarked ? (this.#page.marking().inCode ? "all" : "text") : "none";
    if (marked === this.#marked) return;
    this.#marked = marked;
    if (this.marks.length) for (const text of Object.values(this.#texts)) text.refresh();
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

  get #isMarked() {
    return this.#plain || this.#inspected || this.#page.marking().on;
  }

  #firstTree() {
    return Math.max(0, this.steps.findIndex((step) => step.guesses));
  }

  #container(listeners = {}) {
    return element("div", {
      class: this.#plain ? "tokens plain" : "tokens prose",
      onpointerover: (event) => this.#over(event),
      onpointerout: () => this.#page.note.hide(),
      onclick: (event) => this.#clicked(event),
      ...listeners,
    });
  }

  #made(container) {
    if (this.#plain) return new PlainText(container);
    const marking = () => ({ on: this.#isMarked, inCode: this.#page.marking().inCode });
    return new Prose(container, marking, () => {
      this.onstep?.();
      this.#page.follow();
    });
  }

  #text(channel) {
    if (!this.#texts[channel]) {
      const container = this.#container();
      const fold = element("details", { class: "reasoning" }, element("summary", { text: "Reasoning" }), container);
      this.#before.append(fold);
      this.#texts[channel] = this.#made(container);
    }
    return this.#texts[channel];
  }

  #place(text, token, channel) {
    let mark = null;
    if (token) {
      mark = { index: this.marks.length, token, spans: [] };
      this.marks.push(mark);
      (this.#byStep[token.at] ??= []).push(mark);
    }
    this.#text(channel).append(text, mark);
  }

  #call({ index = 0, function: called = {} }) {
    if (!this.#calls[index]) {
      const shown = { name: element("code", { class: "name" }), arguments: element("code", { class: "arguments" }) };
      this.#calls[index] = shown;
      this.version.calls[index] = { name: "", arguments: "" };
      this.#end.before(element("p", { class: "call" }, "Tool call: ", shown.name, " ", shown.arguments));
    }
    for (const part of ["name", "arguments"]) {
      this.version.calls[index][part] += called[part] ?? "";
      this.#calls[index][part].append(called[part] ?? "");
    }
  }

  #over(event) {
    const mark = this.#isMarked && this.marks[event.target.mark];
    if (mark) this.#page.note.show(this, mark.token, event.target);
  }

  #clicked(event) {
    const mark = this.#isMarked && this.marks[event.target.mark];
    if (!mark || !getSelection().isCollapsed) return;
    this.#go(mark.index);
    this.#page.inspect(this, mark.token.at, this.#body);
  }

  #keyed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.#body || !this.#isMarked) return;
    const shown = this.marks.filter(({ spans }) => spans.length);
    if (!shown.length) return;
    const at = Math.max(0, shown.findIndex(({ index }) => index >= this.#at));
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
    if (event.key === "Enter") this.#page.inspect(this, shown[at].token.at, this.#body);
    else if (to === undefined) return;
    else {
      const mark = shown[Math.min(Math.max(to, 0), shown.length - 1)];
      this.#go(mark.index);
      mark.spans[0].scrollIntoView({ block: "nearest" });
      this.#page.note.show(this, mark.token, mark.spans[0]);
      this.#page.announce(described(this, mark.token));
    }
    event.preventDefault();
  }

  #go(at) {
    this.#light(false);
    this.#at = at;
    this.#light(true);
  }

  #light(on) {
    for (const span of this.marks[this.#at]?.spans ?? []) span.classList.toggle("at", on);
  }

  #deselect() {
    this.#light(false);
    this.#page.note.hide();
  }
}
