// Drawing of a step's tree: nested lists, which screen readers read, with lines between the nodes.

import { element, hidden, svg } from "./dom.js";
import { percent, visible } from "./step.js";
import { columns, layout, shortened } from "./tree_layout.js";
import { listed, speculators } from "./speculators.js";

const GAP = 30; // pixels between columns
const PITCH = 46; // pixels from row to row
const HEIGHT = 36; // pixels of a node
const PADDING = 18; // pixels left and right of a node's text, in total
const BEND = 14;

export function drawTree(step, character) {
  const width = (token) => Math.max(columns(shownText(token)), columns(metaText(step, token))) * character + PADDING;
  const { places, width: right, height } = layout(step, width, { gap: GAP, pitch: PITCH });
  const onPath = new Set(step.path);

  const lines = svg("svg", { "aria-hidden": "true", width: right, height });
  for (const place of [...places].reverse()) {
    if (!place.parent) continue;
    const accepted = place.token.node === null || onPath.has(place.token.node);
    const kind = place.token.node === null ? "edge own" : accepted ? "edge accepted" : "edge";
    lines.append(svg("path", { class: kind, d: curve(place.parent, place) }));
  }

  const lists = new Map();
  const top = element("ul", { role: "list" });
  for (const place of places) {
    const item = element("li", {}, node(step, place, onPath));
    if (place.parent && !lists.has(place.parent)) {
      const below = element("ul", { role: "list" });
      lists.set(place.parent, below);
      place.parent.item.append(below);
    }
    place.item = item;
    (lists.get(place.parent) ?? top).append(item);
  }
  const drawing = element("div", { class: "tree" }, lines, top);
  drawing.style.width = `${right}px`;
  drawing.style.height = `${height}px`;
  return drawing;
}

function node(step, { token, x, y, width }, onPath) {
  const kind = kindOf(token, onPath);
  const box = element("div", { class: `node ${kind}`, title: spoken(token, kind) });
  box.style.transform = `translate(${x}px, ${y}px)`;
  box.style.width = `${width}px`;
  box.style.height = `${HEIGHT}px`;
  const meta = element("span", { class: "meta", "aria-hidden": "true" });
  for (const name of token.by)
    meta.append(element("span", { class: `letter ${speculators.mark([name])}`, text: speculators.letter(name) }));
  meta.append(element("span", { text: token.node === null ? "target" : token.node ? percent(token.likelihood) : "text so far" }));
  box.append(
    element("span", { class: `text ${speculators.mark(token.by)}`, "aria-hidden": "true", text: shownText(token) }),
    meta,
    hidden(spoken(token, kind)),
  );
  return box;
}

function kindOf(token, onPath) {
  if (token.node === null) return "own";
  if (token.node === 0) return "root";
  return onPath.has(token.node) ? "accepted" : "rejected";
}

// Description of a node.
export function spoken(token, kind) {
  const text = `"${token.text.replace(/\n/g, "\u23ce")}"`;
  if (kind === "root") return `${text}, the last token of the text before this step`;
  if (kind === "own") return `${text}, added by the target`;
  const likely = token.likelihood === null ? "" : `, ${percent(token.likelihood)} likely`;
  return `${text}, guessed by ${listed(token.by)}${likely}, ${kind}`;
}

const shownText = (token) => shortened(visible(token.text));

function metaText(step, token) {
  if (token.node === null) return "target";
  if (token.node === 0) return "text so far";
  return `${token.by.map((name) => `${speculators.letter(name)} `).join("")}${percent(token.likelihood)}`;
}

function curve(from, to) {
  const x = from.x + from.width;
  const [y, end] = [from.y + HEIGHT / 2, to.y + HEIGHT / 2];
  if (from.row === to.row) return `M${x} ${y}H${to.x}`;
  const turn = x + BEND / 2;
  return `M${x} ${y}h1Q${turn} ${y} ${turn} ${y + BEND}V${end - BEND}Q${turn} ${end} ${turn + BEND} ${end}H${to.x}`;
}
