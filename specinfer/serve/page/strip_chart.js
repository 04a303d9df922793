// StripChart: tokens per step over an answer, a column for each step and a square for each token.

import { element, svg } from "./dom.js";
import { speculators } from "./speculators.js";

const WIDTH = 7; // of a column, pixels, the gap included
const LEAST = 4; // tokens that the height stands for

export class StripChart {
  #drawing = svg("svg", { "aria-hidden": "true", preserveAspectRatio: "none" });
  #columns = [];
  #most = LEAST;
  #current = null;

  // `choose(index)` is called with the step that is clicked.
  constructor(choose) {
    this.element = element("div", { class: "strip" });
    this.element.append(this.#drawing);
    this.#drawing.addEventListener("click", (event) => {
      const index = Math.floor(event.offsetX / WIDTH);
      if (index < this.#columns.length) choose(index);
    });
  }

  get length() {
    return this.#columns.length;
  }

  add(step) {
    const left = this.#columns.length * WIDTH;
    const column = svg("g", {});
    step.tokens.forEach((token, place) => {
      const square = svg("rect", { x: left, y: -place - 0.9, width: WIDTH - 2, height: 0.8 });
      square.setAttribute("class", speculators.mark(token.by));
      column.append(square);
    });
    this.#drawing.append(column);
    this.#columns.push(column);
    this.#most = Math.max(this.#most, step.tokens.length);
    const width = this.#columns.length * WIDTH;
    this.#drawing.setAttribute("viewBox", `0 ${-this.#most} ${width} ${this.#most}`);
    this.#drawing.style.width = `${width}px`;
  }

  // Mark a step, and bring it into sight.
  mark(index) {
    this.#columns[this.#current]?.classList.remove("current");
    this.#current = index;
    this.#columns[index]?.classList.add("current");
    const middle = (index + 0.5) * WIDTH;
    const { scrollLeft, clientWidth } = this.element;
    if (middle < scrollLeft || middle > scrollLeft + clientWidth)
      this.element.scrollLeft = middle - clientWidth / 2;
  }
}
