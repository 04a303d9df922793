// Speculators: a colour, a line style and a letter for each.
//
// The colours are Okabe and Ito's palette for colour-blind readers. Line styles and letters make speculators
// distinguishable without colour (style.css, .by-0 to .by-7).

const COMMON = ["draft", "lookup", "prediction", "grammar"];
const STYLES = 8;

export class Speculators {
  #styles = new Map(COMMON.map((name, index) => [name, index]));
  #letters = new Map();

  // CSS class of a token's speculators: the style of the first; thicker if there are several.
  mark(names) {
    if (!names.length) return "by-target";
    return `by-${this.#style(names[0])}${names.length > 1 ? " by-several" : ""}`;
  }

  // A short label that starts with a capital letter; longer if another speculator has it.
  letter(name) {
    if (!this.#letters.has(name)) {
      const used = new Set(this.#letters.values());
      const digits = name.match(/\d+$/)?.[0] ?? "";
      const tries = [name[0] + digits, name.slice(0, 2), name.slice(0, 3), name];
      const short = tries.map((one) => one[0].toUpperCase() + one.slice(1));
      this.#letters.set(name, short.find((one) => !used.has(one)) ?? name);
    }
    return this.#letters.get(name);
  }

  #style(name) {
    if (!this.#styles.has(name)) this.#styles.set(name, this.#styles.size % STYLES);
    return this.#styles.get(name);
  }
}

export const speculators = new Speculators();

// "lookup", "draft and lookup", "draft1, draft2 and lookup"
export function listed(names) {
  if (names.length < 2) return names.join("");
  return `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}
