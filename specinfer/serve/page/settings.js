// Settings: parameters of the next request. The browser stores them, and the tab the API key.

import { element } from "./dom.js";

const STORE = "specinfer.page";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const DEFAULTS = { appearance: "system" };
// Where the server names no default of its own.
const PLACEHOLDERS = { temperature: "the server's", top_p: "1", top_k: "all", min_p: "0" };

export class Settings {
  #dialog;
  #form;
  #server;
  #onkey;

  #onchange;

  // `onkey` is called when the key has changed, `onchange` after any change.
  constructor(dialog, server, { onkey, onchange }) {
    this.#dialog = dialog;
    this.#form = dialog.querySelector("form");
    this.#server = server;
    this.#onkey = onkey;
    this.#onchange = onchange;
    this.#fill();
    this.#form.addEventListener("input", () => this.#changed());
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close();
    });
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    this.#form.elements.key.addEventListener("change", () => this.#keep());
    this.#appear();
  }

  // Open the dialog, with the focus on the field `name` if given.
  open(name = null) {
    this.#dialog.showModal();
    const field = name && this.#form.elements[name];
    if (field) field.focus();
    this.#form.reportValidity();
  }

  get valid() {
    return this.#form.checkValidity();
  }

  get system() {
    return this.#value("system").trim();
  }

  // Whether tokens in code are marked.
  get inCode() {
    return this.#form.elements.marks_in_code.checked;
  }

  // Offer the speculators of the server, its tree shape if it has a draft model, and show its defaults.
  offer(card) {
    for (const [name, usual] of Object.entries(PLACEHOLDERS))
      this.#form.elements[name].placeholder = card?.sampling_defaults?.[name] ?? usual;
    const served = card?.speculation;
    const list = this.#form.querySelector(".speculators");
    const off = new Set(this.#kept().off ?? []);
    list.replaceChildren(
      ...(served?.speculators ?? []).map((name) =>
        element(
          "label",
          {},
          element("input", { type: "checkbox", name: "speculator", value: name, checked: !off.has(name) }),
          element("span", { text: name }),
        ),
      ),
    );
    this.#form.elements.expansion.closest("label").hidden = !served?.expansion;
    this.#form.elements.expansion.placeholder = served?.expansion ?? "";
    this.#form.elements.max_nodes.placeholder = served?.max_nodes ?? "";
    if (served?.max_nodes) this.#form.elements.max_nodes.max = served.max_nodes;
    this.#form.elements.verifier.options[0].textContent = served ? `${served.verifier} (server default)` : "server default";
  }

  // Fields of a request.
  get fields() {
    const fields = {};
    for (const name of NUMBERS) if (this.#value(name) !== "") fields[name] = Number(this.#value(name));
    const stop = this.#value("stop").split("\n").filter(Boolean);
    if (stop.length) fields.stop = stop.map((one) => one.replaceAll("\\n", "\n"));
    const speculation = this.#speculation();
    if (Object.keys(speculation).length) fields.speculation = speculation;
    return fields;
  }

  // Mark the field that an error is about.
  complain(name) {
    const field = this.#form.elements[name];
    if (field instanceof HTMLElement) field.setAttribute("aria-invalid", "true");
  }

  #speculation() {
    const boxes = this.#boxes();
    const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
    if (!this.#form.elements.enabled.checked || (boxes.length && !chosen.length)) return { enabled: false };
    const fields = {};
    if (chosen.length < boxes.length) fields.speculators = chosen;
    if (this.#value("max_nodes")) fields.max_nodes = Number(this.#value("max_nodes"));
    if (this.#value("expansion").trim() && !this.#form.elements.expansion.closest("label").hidden)
      fields.expansion = this.#value("expansion").trim();
    if (this.#value("verifier")) fields.verifier = this.#value("verifier");
    return fields;
  }

  #boxes() {
    return [...this.#form.querySelectorAll("[name=speculator]")];
  }

  #value(name) {
    return this.#form.elements[name].value;
  }

  #kept() {
    try {
      return JSON.parse(localStorage.getItem(STORE)) ?? DEFAULTS;
    } catch {
      return DEFAULTS;
    }
  }

  #fill() {
    const kept = this.#kept();
    for (const field of this.#form.elements) {
      if (!field.name || field.name === "speculator") continue;
      if (field.name === "key") field.value = this.#server.key;
      else if (field.type === "checkbox") field.checked = kept[field.name] ?? field.defaultChecked;
      else if (field.name in kept) field.value = kept[field.name];
    }
  }

  #changed() {
    const kept = { off: this.#boxes().filter((box) => !box.checked).map((box) => box.value) };
    for (const field of this.#form.elements) {
      field.removeAttribute("aria-invalid");
      if (!field.name || ["key", "speculator"].includes(field.name)) continue;
      kept[field.name] = field.type === "checkbox" ? field.checked : field.value;
    }
    if (!this.#boxes().length) kept.off = this.#kept().off ?? [];
    localStorage.setItem(STORE, JSON.stringify(kept));
    this.#appear();
    this.#onchange();
  }

  #keep() {
    this.#server.key = this.#value("key").trim();
    this.#onkey();
  }

  #appear() {
    document.documentElement.dataset.appearance = this.#value("appearance");
  }
}
