// TokenText: which part of a text is which token.
//
// The text is what the server shows; the tokens are those of the trees, told before their text. Both agree but
// for tokens the text hides (special ones, marks of reasoning and of calls), characters that lie in several
// tokens, and a stop string that is cut. `place(text, token, channel)` is called for each part in order; the
// token is null where no token explains the text.

const FAR = 256; // tokens that may be hidden one after the other

export class TokenText {
  #place;
  #units = []; // {token, text, bytes, whole}: a token, or several that are a character together
  #text = ""; // told and not placed
  #channel = null;
  #begun = false; // whether the channel has any text

  constructor(place) {
    this.#place = place;
  }

  tokens(tokens) {
    for (const token of tokens) {
      const last = this.#units.at(-1);
      if (token.bytes === null) {
        if (last) last.whole = true;
        this.#units.push({ token, text: token.text, whole: true });
      } else {
        const unit = last && !last.whole ? last : { token, bytes: [], whole: false };
        if (unit !== last) this.#units.push(unit);
        unit.bytes.push(...token.bytes);
        const bytes = new Uint8Array(unit.bytes);
        unit.text = new TextDecoder().decode(bytes);
        unit.whole = isWhole(bytes);
      }
    }
  }

  text(text, channel = "content") {
    if (channel !== this.#channel) {
      this.#advance(true);
      this.#channel = channel;
      this.#begun = false;
    }
    this.#text += text;
    this.#advance(false);
  }

  // The tokens so far that have no text will have none.
  skip() {
    this.#advance(true);
    this.#units = [];
  }

  // Place tokens as they are, where nobody tells the text: in a trace.
  asTheyAre() {
    for (const { text, token } of this.#units.splice(0)) this.#place(text, token, "content");
  }

  #advance(last) {
    while (this.#text) {
      const unit = this.#units[0];
      if (!unit) return this.#take(this.#text.length, null);
      if (!unit.whole && !last) return;
      const shown = this.#shown(unit);
      if (this.#text.startsWith(shown)) this.#take(shown.length, unit);
      else if (shown.startsWith(this.#text)) {
        if (!last) return;
        this.#take(this.#text.length, unit);
      } else {
        const hidden = this.#hidden();
        if (!hidden) return this.#take(this.#text.length, null);
        this.#units.splice(0, hidden);
      }
    }
  }

  // How many tokens stand before the first one that the text may begin with; 0: there is none.
  #hidden() {
    const found = this.#units.slice(0, FAR).findIndex((unit) => {
      const shown = this.#shown(unit);
      return shown && (this.#text.startsWith(shown) || shown.startsWith(this.#text));
    });
    return Math.max(found, 0);
  }

  // A unit as the text would show it: a text's first word may have lost the space before it.
  #shown({ text }) {
    return this.#begun || this.#text.startsWith(text) ? text : text.trimStart() || text;
  }

  #take(length, unit) {
    if (unit) this.#units.shift();
    if (!length) return;
    this.#begun = true;
    const text = this.#text.slice(0, length);
    this.#text = this.#text.slice(length);
    this.#place(text, unit?.token ?? null, this.#channel);
  }
}

function isWhole(bytes) {
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return true;
  } catch {
    return false;
  }
}
