// Layout of a step's tree: left to right by depth, with the accepted path in the top row.

const MAX_SHOWN = 18; // characters of a node's text
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60]|\p{Emoji_Presentation}/u;

// Width of a text in a monospaced font, in columns.
export function columns(text) {
  let count = 0;
  for (const character of text) count += WIDE.test(character) ? 2 : 1;
  return count;
}

export function shortened(text) {
  const characters = [...text];
  return characters.length > MAX_SHOWN ? `${characters.slice(0, MAX_SHOWN - 1).join("")}\u2026` : text;
}

// Return places {token, x, y, width, parent} for `step`; `width(token)` is in pixels. The root comes first, and
// its parent is null. The target's token is below the last node of the path.
//
// A node is in the row of its first child, so a path without branches is a straight line. Branches take the
// highest free row, and no line crosses another.
export function layout(step, width, { gap, pitch }) {
  const places = [];
  const children = step.children;
  const last = step.path.at(-1) ?? 0;
  const free = []; // first free row by depth

  const below = (token) => {
    if (token.node === null) return [];
    const found = children[token.node].map((node) => step.nodes[node]);
    return token.node === last ? [step.next, ...found] : found;
  };
  const grow = (first, depth, parent) => {
    const line = [];
    for (let token = first; token; [token] = below(token)) line.push(token);
    const row = Math.max(0, (parent?.row ?? -1) + 1, ...line.map((_, place) => free[depth + place] ?? 0));
    let above = parent;
    const placed = line.map((token, place) => {
      above = { token, depth: depth + place, parent: above, row, width: width(token) };
      free[above.depth] = row + 1;
      places.push(above);
      return above;
    });
    for (const place of placed.reverse())
      for (const child of below(place.token).slice(1)) grow(child, place.depth + 1, place);
  };
  grow(step.nodes[0], 0, null);

  const widest = [];
  for (const { depth, width } of places) widest[depth] = Math.max(widest[depth] ?? 0, width);
  const left = widest.map((_, depth) => widest.slice(0, depth).reduce((sum, one) => sum + one + gap, 0));
  for (const place of places) {
    place.x = left[place.depth];
    place.y = place.row * pitch;
  }
  return { places, width: left.at(-1) + widest.at(-1), height: Math.max(...free) * pitch };
}
