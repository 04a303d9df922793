// StripChart: tokens per step of an answer, with a column per step and a square per token.

import { element, svg } from "./dom.js";
import { speculators } from "./speculators.js";

const WIDTH = 7; // pixels of a column and its gap
const MIN_HEIGHT = 4; // tokens

export class StripChart {
  #drawing = svg("svg", { "aria-hidden": "true", preserveAspectRatio: "none" });
  #columns = [];
  #height = MIN_HEIGHT;
  #current = null;

  // `choose(index)` is called when a step is clicked.
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
    step.tokens.forEach((token, row) => {
      const square = svg("rect", { x: left, y: -row - 0.9, width: WIDTH - 2, height: 0.8 });
      square.setAttribute("class", speculators.mark(token.by));
      column.append(square);
    });
    this.#drawing.append(column);
    this.#columns.push(column);
    this.#height = Math.max(this.#height, step.tokens.length);
    const width = this.#columns.length * WIDTH;
    this.#drawing.setAttribute("viewBox", `0 ${-this.#height} ${width} ${this.#height}`);
    this.#drawing.style.width = `${width}px`;
  }

  // Mark a step and scroll it into view.
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
