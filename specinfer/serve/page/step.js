// Step: one step's token tree, checked, and the tokens it added to the text.
//
// The form is that of TreeEvent.to_json: node 0 is the root, the last token before the step; `path` are the
// nodes that the target accepted, and `next_token` is the one it added of its own.

export class Step {
  constructor(event) {
    const wrong = complaint(event);
    if (wrong) throw new Error(wrong);
    this.event = event;
    this.number = event.step;
    this.request = event.request_id ?? "";
    this.seconds = Object.entries(event.seconds ?? {});
    this.nodes = event.token_ids.map((id, node) => ({
      node,
      id,
      parent: event.parents[node],
      by: event.proposed_by[node],
      likelihood: event.likelihoods?.[node] ?? null,
      ...textOf(event, id, event.texts?.[node]),
    }));
    this.path = event.path;
    this.next = {
      node: null,
      id: event.next_token,
      by: [],
      likelihood: null,
      ...textOf(event, event.next_token, event.next_text),
    };
    // What the step added to the text, in order.
    this.tokens = [...this.path.map((node) => this.nodes[node]), this.next];
  }

  get guesses() {
    return this.nodes.length - 1;
  }

  get accepted() {
    return this.path.length;
  }

  // Children of every node, those on the accepted path first.
  get children() {
    const below = this.nodes.map(() => []);
    const onPath = new Set(this.path);
    for (const { node, parent } of this.nodes.slice(1)) {
      if (onPath.has(node)) below[parent].unshift(node);
      else below[parent].push(node);
    }
    return below;
  }

  get total() {
    return this.seconds.reduce((sum, [, seconds]) => sum + seconds, 0);
  }

  // Why so much was guessed, in a line; "" where nobody asked.
  get reasons() {
    const { expected_tokens: expected, speculators } = this.event.decision ?? {};
    if (!Array.isArray(speculators)) return "";
    const turns = speculators.map(({ name, reason, drawn, verified }) =>
      reason === "guessed" ? `${name}: ${verified} of ${drawn} verified` : `${name}: ${reason}`,
    );
    if (typeof expected === "number") turns.unshift(`${expected.toFixed(2)} tokens expected`);
    return turns.join("; ");
  }

  get summary() {
    const added = plural(this.tokens.length, "token");
    if (!this.guesses) return `no guesses, ${added}`;
    return `${this.accepted} of ${plural(this.guesses, "guess", "guesses")} accepted, ${added}`;
  }
}

export function plural(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

// A token's text with what would not be seen made visible.
export function visible(text) {
  if (text === "") return "\u2205";
  return text
    .replace(/\n/g, "\u23ce")
    .replace(/\t/g, "\u21e5")
    .replace(/[\u0000-\u001f\u007f-\u009f]/g, "\ufffd")
    .replace(/ /g, "\u00b7");
}

export function percent(likelihood) {
  if (likelihood === null) return "";
  const value = 100 * likelihood;
  return value > 0 && value < 1 ? "<1%" : `${Math.round(value)}%`;
}

function textOf(event, id, text) {
  const bytes = event.bytes?.[id];
  return {
    text: text ?? ` #${id}`, // a trace without texts
    bytes: bytes ? bytes.match(/../g).map((pair) => parseInt(pair, 16)) : null,
  };
}

function complaint(event) {
  if (event === null || typeof event !== "object") return "it is no JSON object";
  const { token_ids: ids, parents, path, proposed_by: names } = event;
  if (!areIntegers(ids) || !ids.length) return "token_ids is no list of integers";
  if (!areIntegers(parents) || parents.length !== ids.length)
    return "parents is no list of as many integers as token_ids";
  if (parents[0] !== -1 || parents.some((parent, node) => node && (parent < 0 || parent >= node)))
    return "parents is no tree: the first is -1, and each other one an earlier node";
  if (!areIntegers(path) || path.some((node) => node < 1 || node >= ids.length))
    return "path is no list of nodes";
  if (path.some((node, depth) => parents[node] !== (depth ? path[depth - 1] : 0)))
    return "path does not lead down the tree from its root";
  if (!Number.isInteger(event.next_token) || !Number.isInteger(event.step))
    return "step and next_token are integers";
  if (!Array.isArray(names) || names.length !== ids.length || !names.every((some) => areOf(some, "string")))
    return "proposed_by is no list of lists of names, one for each node";
  for (const [name, kind] of [["texts", "string"], ["likelihoods", "number"]])
    if (name in event && (!areOf(event[name], kind) || event[name].length !== ids.length))
      return `${name} has not one value for each node`;
  return "";
}

const areOf = (values, kind) => Array.isArray(values) && values.every((value) => typeof value === kind);
const areIntegers = (values) => Array.isArray(values) && values.every(Number.isInteger);
