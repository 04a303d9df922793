// Scroll: keeps the end of the text in view unless the user has scrolled up.

const NEAR = 80; // pixels from the end within which the page scrolls with new text

export class Scroll {
  #element;
  #followed = true;
  #due = false;
  #top = 0;

  constructor(element) {
    this.#element = element;
    element.addEventListener("scroll", () => this.#scrolled());
  }

  // Show the end, with `always` also if the user has scrolled up.
  follow(always = false) {
    if (always) this.#followed = true;
    if (!this.#followed || this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      if (this.#followed) this.#element.scrollTop = this.#element.scrollHeight;
    });
  }

  // Stay where the text is.
  hold() {
    this.#followed = false;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.#element;
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#followed = true;
    else if (scrollTop < this.#top) this.#followed = false; // the text did not only grow
    this.#top = scrollTop;
  }
}
