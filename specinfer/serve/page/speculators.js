// Speculators: the colour, line and letter of each, the same wherever it is shown.
//
// Colours are Okabe and Ito's, which colour-blind people tell apart; a line of its own kind and a letter say
// the same without colour (style.css, .by-0 to .by-7).

const USUAL = ["draft", "lookup", "prediction", "grammar"];
const PLACES = 8;

export class Speculators {
  #places = new Map(USUAL.map((name, place) => [name, place]));
  #letters = new Map();

  // The class that gives an element the marks of who guessed; several: of the first, thicker.
  mark(names) {
    if (!names.length) return "by-target";
    return `by-${this.#place(names[0])}${names.length > 1 ? " by-several" : ""}`;
  }

  // One capital letter, or two where another speculator has it.
  letter(name) {
    if (!this.#letters.has(name)) {
      const taken = new Set(this.#letters.values());
      const digits = name.match(/\d+$/)?.[0] ?? "";
      const tries = [name[0] + digits, name.slice(0, 2), name.slice(0, 3), name];
      const short = tries.map((one) => one[0].toUpperCase() + one.slice(1));
      this.#letters.set(name, short.find((one) => !taken.has(one)) ?? name);
    }
    return this.#letters.get(name);
  }

  #place(name) {
    if (!this.#places.has(name)) this.#places.set(name, this.#places.size % PLACES);
    return this.#places.get(name);
  }
}

export const speculators = new Speculators();

// "lookup", "draft and lookup", "draft1, draft2 and lookup"
export function listed(names) {
  if (names.length < 2) return names.join("");
  return `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}
