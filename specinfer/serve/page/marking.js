// Marking: puts the words of rendered Markdown into spans of the tokens that they come from.
//
// The words stand in the source in the same order, with signs of Markdown between them.

import { element } from "./dom.js";
import { speculators } from "./speculators.js";

const WORD = /[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu;
const PART = /[\p{L}\p{N}]/u;
const REACH = 2000; // characters of signs, such as a link's address, between two words

// Wrap the words of `fragment`, rendered from `source`, which starts at `start` in the answer. `marks` are
// the answer's {start, end, token, spans}, in order; the new spans are added to them.
export function markWords(fragment, source, start, marks, inCode) {
  let at = 0;
  let first = 0;
  for (const node of textNodes(fragment)) {
    const pieces = [];
    const plain = inCode || !node.parentElement?.closest("code, .math");
    for (const { 0: word, index } of node.data.matchAll(WORD)) {
      const found = find(source, word, at);
      if (found < 0) continue;
      at = found + word.length;
      while (first < marks.length && marks[first].end <= start + found) first += 1;
      for (let i = first; plain && i < marks.length && marks[i].start < start + at; i += 1) {
        const from = index + Math.max(marks[i].start - start - found, 0);
        const to = index + Math.min(marks[i].end - start, at) - found;
        const last = pieces.at(-1);
        if (last?.mark === marks[i]) last.to = to;
        else pieces.push({ mark: marks[i], from, to });
      }
    }
    if (pieces.length) split(node, pieces);
  }
}

function textNodes(fragment) {
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) found.push(walker.currentNode);
  return found;
}

// Place of a word at or after `at`, not inside of another word; -1 if it is not near.
function find(source, word, at) {
  for (let found = source.indexOf(word, at); found >= 0 && found - at < REACH; found = source.indexOf(word, found + 1)) {
    const inside = PART.test(word) && (PART.test(source[found - 1] ?? "") || PART.test(source[found + word.length] ?? ""));
    if (!inside) return found;
  }
  return -1;
}

function split(node, pieces) {
  const parts = [];
  let done = 0;
  for (const { mark, from, to } of pieces) {
    const span = markSpan(mark, node.data.slice(from, to));
    parts.push(node.data.slice(done, from), span);
    done = to;
  }
  node.replaceWith(...parts.filter((part) => part !== ""), node.data.slice(done));
}

// A span of a mark's token.
export function markSpan(mark, text) {
  const span = element("span", { class: `token ${speculators.mark(mark.token.by)}`, text });
  span.mark = mark.index;
  mark.spans.push(span);
  return span;
}
