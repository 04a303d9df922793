// Where the nodes of a step's tree are drawn: left to right by depth, the accepted path straight along the top.

const LONGEST = 18; // characters of a node's text that are shown
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60]|\p{Emoji_Presentation}/u;

// Columns a text takes in a monospaced font.
export function columns(text) {
  let count = 0;
  for (const character of text) count += WIDE.test(character) ? 2 : 1;
  return count;
}

export function shortened(text) {
  const characters = [...text];
  return characters.length > LONGEST ? `${characters.slice(0, LONGEST - 1).join("")}\u2026` : text;
}

// `step` with `width(token)` in pixels gives places {token, x, y, width, parent}: a place's parent is a place,
// null for the root's, which comes first. The target's own token hangs below the last node of the path.
//
// A node stands in the row of its first child, so a path without branches is a straight line; branches go as
// far up as what stands there already lets them, and no line crosses another.
export function layout(step, width, { gap, pitch }) {
  const places = [];
  const children = step.children;
  const last = step.path.at(-1) ?? 0;
  const free = []; // of each depth the first row that is free

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
