// Side: the column of conversations. On narrow screens it lies over the page, and is closed at first.

const CLOSED = "specinfer.side";
const WIDE = matchMedia("(min-width: 60rem)");

export class Side {
  #element;
  #toggle;
  #shade;
  #closed = localStorage.getItem(CLOSED) === "closed"; // on wide screens
  #over = false; // on narrow screens

  constructor(side, toggle, shade) {
    this.#element = side;
    this.#toggle = toggle;
    this.#shade = shade;
    toggle.addEventListener("click", () => (this.#isOpen ? this.#hide() : this.#show()));
    shade.addEventListener("click", () => this.close());
    side.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    // A click on the conversation that is shown changes no address.
    side.addEventListener("click", (event) => event.target.closest("a") && this.close());
    WIDE.addEventListener("change", () => this.#update());
    this.#update();
  }

  // Close it where it lies over the page.
  close() {
    if (!this.#over) return;
    this.#over = false;
    this.#update();
    this.#toggle.focus();
  }

  get #isOpen() {
    return WIDE.matches ? !this.#closed : this.#over;
  }

  #show() {
    if (WIDE.matches) this.#keep(false);
    else this.#over = true;
    this.#update();
    if (this.#over) this.#element.querySelector("button").focus();
  }

  #hide() {
    if (WIDE.matches) this.#keep(true);
    this.#over = false;
    this.#update();
  }

  #keep(closed) {
    this.#closed = closed;
    localStorage.setItem(CLOSED, closed ? "closed" : "open");
  }

  #update() {
    if (WIDE.matches) this.#over = false;
    this.#element.classList.toggle("closed", !this.#isOpen);
    this.#shade.hidden = !this.#over;
    document.getElementById("stage").inert = this.#over;
    this.#toggle.setAttribute("aria-expanded", this.#isOpen);
  }
}
