// TokenText: aligns the text of an answer with its tokens.
//
// The tokens come from the trees, before their text. The text lacks special tokens, delimiters of reasoning and
// calls, and stop strings; a character may also consist of several tokens. `place(text, token, channel)` is
// called for each part in order; the token is null if no token matches the text.

const MAX_HIDDEN = 256; // consecutive tokens without text

export class TokenText {
  #place;
  #units = []; // {token, text, bytes, whole}: one token, or several that form a character
  #text = ""; // received but not placed
  #channel = null;
  #started = false; // true if the channel has text

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
      this.#started = false;
    }
    this.#text += text;
    this.#advance(false);
  }

  // Drop the tokens so far: no text of them follows.
  skip() {
    this.#advance(true);
    this.#units = [];
  }

  // Place the tokens' own texts, for a trace.
  placeAll() {
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

  // Number of tokens before the first one that matches the start of the text; 0 if none matches.
  #hidden() {
    const found = this.#units.slice(0, MAX_HIDDEN).findIndex((unit) => {
      const shown = this.#shown(unit);
      return shown && (this.#text.startsWith(shown) || shown.startsWith(this.#text));
    });
    return Math.max(found, 0);
  }

  // Text of a unit; the first word of a text may lack the space before it.
  #shown({ text }) {
    return this.#started || this.#text.startsWith(text) ? text : text.trimStart() || text;
  }

  #take(length, unit) {
    if (unit) this.#units.shift();
    if (!length) return;
    this.#started = true;
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
