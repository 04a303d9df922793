// Inspector: panel with the tree and the cost of one step, and buttons to play the steps.

import { button, element } from "./dom.js";
import { StripChart } from "./strip_chart.js";
import { drawTree } from "./tree_drawing.js";

const PACE = 700; // milliseconds per step
const STAGES = ["schedule", "propose", "target_forward", "verify", "commit"];

export class Inspector {
  #panel;
  #announce;
  #answer = null;
  #index = 0;
  #from = null; // element that had the focus
  #timer = null;
  #title = element("h2", { id: "inspector-title", tabindex: "-1" });
  #summary = element("p", { class: "summary" });
  #tree = element("div", { class: "tree-view", tabindex: "0", role: "region", "aria-label": "Tree of the step" });
  #facts = element("div", { class: "facts" });
  #timeline = element("div", { class: "timeline", role: "slider", tabindex: "0", "aria-label": "Step", "aria-valuemin": "1" });
  #strip = null;
  #play;
  #previous;
  #next;

  constructor(panel, announce) {
    this.#panel = panel;
    this.#announce = announce;
    this.#previous = button("\u2039", () => this.#go(this.#index - 1), { "aria-label": "Previous step", title: "Previous step (left arrow)" });
    this.#next = button("\u203a", () => this.#go(this.#index + 1), { "aria-label": "Next step", title: "Next step (right arrow)" });
    this.#play = button("Play", () => this.#toggle(), { class: "play", title: "Play the steps (space)" });
    const close = button("Close", () => this.close(), { class: "close", title: "Close (Escape)" });
    panel.append(
      element(
        "header",
        {},
        element("div", { class: "heading" }, this.#title, this.#summary),
        element("div", { class: "transport", role: "group", "aria-label": "Steps" }, this.#previous, this.#play, this.#next),
        close,
      ),
      this.#timeline,
      element("div", { class: "body" }, this.#tree, this.#facts),
      legend(),
    );
    panel.addEventListener("keydown", (event) => this.#keyed(event));
  }

  get isOpen() {
    return !this.#panel.hidden;
  }

  // Show a step. With `from`, the focus moves to the panel, and back to `from` when it closes.
  open(answer, index, from = null) {
    if (answer !== this.#answer) this.#attach(answer);
    this.#from = from;
    this.#panel.hidden = false;
    this.#show(index);
    this.#timeline.scrollLeft = 0;
    this.#strip.mark(index);
    if (from) this.#title.focus({ preventScroll: true });
  }

  close() {
    if (!this.#answer) return;
    const within = this.#panel.contains(document.activeElement);
    this.#detach();
    this.#panel.hidden = true;
    if (within) this.#from?.focus({ preventScroll: true });
  }

  // Close the panel if it shows this answer.
  forget(answer) {
    if (answer === this.#answer) this.close();
  }

  #attach(answer) {
    this.#detach();
    this.#answer = answer;
    this.#strip = new StripChart((index) => this.#go(index));
    this.#timeline.replaceChildren(this.#strip.element);
    this.#grow();
    answer.mark(true);
    answer.onstep = () => {
      this.#grow();
      this.#describe();
      this.#light(true); // the text may have been rendered again
    };
  }

  #detach() {
    this.#stop();
    if (!this.#answer) return;
    this.#light(false);
    this.#answer.onstep = null;
    this.#answer.mark(false);
    this.#answer = null;
  }

  #grow() {
    const { steps } = this.#answer;
    for (const step of steps.slice(this.#strip.length)) this.#strip.add(step);
  }

  #go(index) {
    const last = this.#answer.steps.length - 1;
    const target = Math.min(Math.max(index, 0), last);
    if (target === this.#index) return;
    this.#show(target);
    this.#announce(`Step ${target + 1}: ${this.#step.summary}`);
  }

  get #step() {
    return this.#answer.steps[this.#index];
  }

  #show(index) {
    this.#light(false);
    this.#index = index;
    const step = this.#step;
    this.#tree.replaceChildren(drawTree(step, characterWidth(this.#tree)));
    this.#tree.scrollTo(0, 0);
    this.#summary.textContent = step.summary;
    this.#facts.replaceChildren(cost(step));
    this.#strip.mark(index);
    this.#describe();
    this.#light(true);
    const [first] = this.#answer.marksOf(index);
    first?.spans[0]?.scrollIntoView({ block: "nearest", behavior: calm() ? "auto" : "smooth" });
  }

  // Show the position among the steps, whose number may have grown.
  #describe() {
    const count = this.#answer.steps.length;
    this.#title.replaceChildren(`Step ${this.#index + 1} `, element("span", { class: "of", text: `of ${count}` }));
    this.#timeline.setAttribute("aria-valuemax", count);
    this.#timeline.setAttribute("aria-valuenow", this.#index + 1);
    this.#timeline.setAttribute("aria-valuetext", `Step ${this.#index + 1} of ${count}: ${this.#step.summary}`);
    this.#previous.disabled = this.#index === 0;
    this.#next.disabled = this.#index === count - 1;
  }

  // Mark the step's tokens in the answer.
  #light(on) {
    if (!this.#answer) return;
    for (const { spans } of this.#answer.marksOf(this.#index))
      for (const span of spans) span.classList.toggle("current", on);
  }

  // While steps play, tokens of later steps are grey.
  #later(index, wait) {
    for (const { spans } of this.#answer.marksOf(index))
      for (const span of spans) span.classList.toggle("later", wait);
  }

  #toggle() {
    if (this.#timer) return this.#stop();
    if (this.#index === this.#answer.steps.length - 1) this.#show(0);
    for (let index = this.#index + 1; index < this.#answer.steps.length; index += 1) this.#later(index, true);
    this.#timer = setInterval(() => this.#tick(), PACE);
    this.#playing(true);
  }

  #tick() {
    const last = this.#answer.steps.length - 1;
    if (this.#index >= last) return this.#stop();
    this.#later(this.#index + 1, false);
    this.#show(this.#index + 1);
    if (this.#index === last && this.#answer.finished) this.#stop();
  }

  #stop() {
    if (!this.#timer) return;
    clearInterval(this.#timer);
    this.#timer = null;
    for (const { spans } of this.#answer.marks) for (const span of spans) span.classList.remove("later");
    this.#playing(false);
  }

  #playing(on) {
    this.#play.textContent = on ? "Pause" : "Play";
    this.#play.classList.toggle("on", on);
  }

  #keyed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inTree = event.target === this.#tree; // arrow keys scroll there
    const onButton = event.target.tagName === "BUTTON";
    const last = this.#answer.steps.length - 1;
    const to = { ArrowLeft: this.#index - 1, ArrowRight: this.#index + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.close();
    else if (event.key === " " && !onButton) this.#toggle();
    else if (to !== undefined && !inTree) this.#go(to);
    else return;
    event.preventDefault();
  }
}

// Legend of the tree's boxes.
function legend() {
  const kinds = [
    ["accepted", "accepted"],
    ["rejected", "rejected"],
    ["own", "added by the target"],
  ];
  return element(
    "p",
    { class: "kinds" },
    ...kinds.map(([kind, text]) => element("span", { class: `kind ${kind}`, text })),
    element("span", { text: "Percentages are the probabilities that speculators gave." }),
  );
}

// Cost of a step: a bar of its stages, and the time per token.
function cost(step) {
  const { total } = step;
  const made = element("section", { class: "cost", "aria-label": "Cost of the step" });
  const facts = [
    ["nodes", step.nodes.length],
    ["accepted", step.accepted],
    ["tokens", step.tokens.length],
  ];
  if (total) facts.push(["time", duration(total)], ["per token", duration(total / step.tokens.length)]);
  const list = element("dl", { class: "numbers" });
  for (const [name, value] of facts)
    list.append(element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
  made.append(list);
  if (step.reasons) made.append(element("p", { class: "remark", text: step.reasons }));
  if (!total) {
    made.append(element("p", { class: "remark", text: "No times were recorded." }));
    return made;
  }
  const bar = element("div", { class: "bar-of-stages", "aria-hidden": "true" });
  const stages = element("ul", { class: "stages", role: "list" });
  for (const [name, seconds] of step.seconds) {
    const kind = `stage-${Math.max(STAGES.indexOf(name), 0)}`;
    const part = element("span", { class: kind });
    part.style.flexGrow = seconds / total;
    bar.append(part);
    stages.append(
      element(
        "li",
        {},
        element("span", { class: `key ${kind}`, "aria-hidden": "true" }),
        element("span", { text: name.replaceAll("_", " ") }),
        element("span", { class: "count", text: duration(seconds) }),
      ),
    );
  }
  const remark = "Times cover the whole batch.";
  made.append(bar, stages, element("p", { class: "remark", text: remark }));
  return made;
}

function duration(seconds) {
  const thousandths = 1000 * seconds;
  if (thousandths >= 10) return `${thousandths.toFixed(0)} ms`;
  return `${thousandths >= 1 ? thousandths.toFixed(1) : Number(thousandths.toPrecision(2))} ms`;
}

// Width of a character in the tree's font, in pixels.
function characterWidth(view) {
  const probe = element("span", { class: "node-font", text: "0".repeat(50), "aria-hidden": "true" });
  view.append(probe);
  const { width } = probe.getBoundingClientRect();
  probe.remove();
  return width / 50;
}

function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
