// Step: the validated token tree of one step, and the tokens that it added to the text.
//
// The format is that of TreeEvent.to_json: node 0 is the root, the last token before the step; `path` has the
// nodes that the target accepted, and `next_token` is the token that it added.

export class Step {
  constructor(event) {
    const fault = faultOf(event);
    if (fault) throw new Error(fault);
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
    // Tokens that the step added to the text, in order.
    this.tokens = [...this.path.map((node) => this.nodes[node]), this.next];
  }

  get guesses() {
    return this.nodes.length - 1;
  }

  get accepted() {
    return this.path.length;
  }

  // Children of every node; the one on the accepted path comes first.
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

  // Reasons for the size of the tree, in one line; "" if the event has none.
  get reasons() {
    const { expected_tokens: expected, speculators } = this.event.decision ?? {};
    if (!Array.isArray(speculators)) return "";
    const reasons = speculators.map(({ name, reason, drawn, verified }) =>
      reason === "guessed" ? `${name}: ${verified} of ${drawn} verified` : `${name}: ${reason}`,
    );
    if (typeof expected === "number") reasons.unshift(`${expected.toFixed(2)} tokens expected`);
    return reasons.join("; ");
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

// A token's text with visible white space and control characters.
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
    text: text ?? ` #${id}`, // the trace has no texts
    bytes: bytes ? bytes.match(/../g).map((pair) => parseInt(pair, 16)) : null,
  };
}

function faultOf(event) {
  if (event === null || typeof event !== "object") return "it is not a JSON object";
  const { token_ids: ids, parents, path, proposed_by: names } = event;
  if (!areIntegers(ids) || !ids.length) return "token_ids must be a list of integers";
  if (!areIntegers(parents) || parents.length !== ids.length)
    return "parents must be a list of integers, as long as token_ids";
  if (parents[0] !== -1 || parents.some((parent, node) => node && (parent < 0 || parent >= node)))
    return "parents is not a tree: the first must be -1, and each other one an earlier node";
  if (!areIntegers(path) || path.some((node) => node < 1 || node >= ids.length))
    return "path must be a list of nodes";
  if (path.some((node, depth) => parents[node] !== (depth ? path[depth - 1] : 0)))
    return "path must lead down the tree from its root";
  if (!Number.isInteger(event.next_token) || !Number.isInteger(event.step))
    return "step and next_token must be integers";
  if (!Array.isArray(names) || names.length !== ids.length || !names.every((some) => areOf(some, "string")))
    return "proposed_by must have a list of names for each node";
  for (const [name, kind] of [["texts", "string"], ["likelihoods", "number"]])
    if (name in event && (!areOf(event[name], kind) || event[name].length !== ids.length))
      return `${name} must have one value for each node`;
  return "";
}

const areOf = (values, kind) => Array.isArray(values) && values.every((value) => typeof value === kind);
const areIntegers = (values) => Array.isArray(values) && values.every(Number.isInteger);
