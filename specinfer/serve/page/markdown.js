// Markdown: blocks of an answer's text as elements.
//
// The answer is a model's, so its HTML is shown as text, images become links, and the sanitizer admits only the
// elements below. Mathematics is TeX as text: no emphasis or escape is read in it.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const ADMITTED = {
  ALLOWED_TAGS: [
    ...["p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "a", "span", "div"],
    ...["ul", "ol", "li", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"],
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align"],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const CHARACTERS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => text.replace(/[&<>"]/g, (one) => CHARACTERS[one]);

// A display formula ends its line; one that has just begun reaches to the end of the text. Neither crosses a code fence.
const DISPLAY = [
  /^ {0,3}\\\[[ \t]*\n?(?:(?!(?<=\n) {0,3}(?:```|~~~))[\s\S])+?\\\][ \t]*[.,;]?[ \t]*(?:\n|$)/,
  /^ {0,3}\$\$[ \t]*\n?(?:(?!(?<=\n) {0,3}(?:```|~~~))[\s\S])+?\$\$[ \t]*[.,;]?[ \t]*(?:\n|$)/,
  /^ {0,3}(?:\\\[|\$\$)[ \t]*\n(?:(?!(?<=\n) {0,3}(?:```|~~~))[\s\S])*$/,
];
// A dollar sign before a digit or after a space closes no formula: it is money.
const INLINE = [
  /^\\\([\s\S]+?\\\)/,
  /^\\\[[^\n]+?\\\]/,
  /^\$\$[^$\n]+?\$\$/,
  /^\$(?![\s$])(?:\\.|[^$\\\n])+?(?<!\s)\$(?![\d$])/,
];

function firstOf(text, ...signs) {
  const found = signs.map((sign) => text.indexOf(sign)).filter((index) => index >= 0);
  return found.length ? Math.min(...found) : undefined;
}

function formula(name, level, patterns, tag, start) {
  return {
    name,
    level,
    start,
    tokenizer(text) {
      for (const pattern of patterns) {
        const match = pattern.exec(text);
        if (match) return { type: name, raw: match[0], text: match[0] };
      }
    },
    // The signs are shown: the text may be no formula, as in $HOME/$USER.
    renderer: ({ raw }) => `<${tag} class="math">${escaped(raw.trim())}</${tag}>`,
  };
}

const lineBreak = {
  name: "lineBreak",
  level: "inline",
  start: (text) => firstOf(text, "<br"),
  tokenizer(text) {
    const match = /^<br\s*\/?>/i.exec(text);
    return match ? { type: "lineBreak", raw: match[0] } : undefined;
  },
  renderer: () => "<br>",
};

const marked = new Marked({ gfm: true, breaks: true });
marked.use({
  extensions: [
    formula("displayFormula", "block", DISPLAY, "div", (text) => firstOf(text, "\n\\[", "\n$$")),
    formula("formula", "inline", INLINE, "span", (text) => firstOf(text, "$", "\\(", "\\[")),
    lineBreak,
  ],
  tokenizer: { html: () => undefined, tag: () => undefined }, // undefined: no HTML
  renderer: {
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6); // below the page's own headings
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "\u2611 " : "\u2610 "),
  },
});

// The blocks of a text, in order: each has `raw`, its part of the text.
export function blocksOf(text) {
  return marked.lexer(text);
}

// A block as elements.
export function rendered(block) {
  const html = marked.parser([block]);
  return globalThis.DOMPurify.sanitize(html, ADMITTED);
}

// True if a link's address may stand in another block than the link.
export function hasDefinitions(text) {
  return /^ {0,3}\[[^\]\n]+\]:/m.test(text);
}
