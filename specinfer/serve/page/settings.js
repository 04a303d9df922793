// Settings: what the next answer is asked with; kept by the browser, but for the key, which the tab keeps.

import { element } from "./dom.js";

const STORE = "specinfer.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
// Small models write nonsense at temperature 1 with every token allowed.
const USUAL = { temperature: "0.7", top_p: "0.95", max_tokens: "1024", appearance: "system" };

export class Settings {
  #dialog;
  #form;
  #server;
  #onkey;

  // `onkey` is called when the key has changed.
  constructor(dialog, server, onkey) {
    this.#dialog = dialog;
    this.#form = dialog.querySelector("form");
    this.#server = server;
    this.#onkey = onkey;
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

  // Open it, at a field if one is named.
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

  // What the server told of itself: offer its speculators, and the shape of trees where a draft grows some.
  offer(card) {
    const told = card?.speculation;
    const place = this.#form.querySelector(".speculators");
    const off = new Set(this.#kept().off ?? []);
    place.replaceChildren(
      ...(told?.speculators ?? []).map((name) =>
        element(
          "label",
          {},
          element("input", { type: "checkbox", name: "speculator", value: name, checked: !off.has(name) }),
          element("span", { text: name }),
        ),
      ),
    );
    this.#form.elements.expansion.closest("label").hidden = !told?.expansion;
    this.#form.elements.expansion.placeholder = told?.expansion ?? "";
    this.#form.elements.max_nodes.placeholder = told?.max_nodes ?? "";
    if (told?.max_nodes) this.#form.elements.max_nodes.max = told.max_nodes;
    this.#form.elements.verifier.options[0].textContent = told ? `${told.verifier} (the server's)` : "the server's";
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

  // Point at the field an error is about.
  complain(name) {
    const field = this.#form.elements[name];
    if (field instanceof HTMLElement) field.setAttribute("aria-invalid", "true");
  }

  #speculation() {
    const boxes = this.#boxes();
    const wanted = boxes.filter((box) => box.checked).map((box) => box.value);
    if (!this.#form.elements.enabled.checked || (boxes.length && !wanted.length)) return { enabled: false };
    const asked = {};
    if (wanted.length < boxes.length) asked.speculators = wanted;
    if (this.#value("max_nodes")) asked.max_nodes = Number(this.#value("max_nodes"));
    if (this.#value("expansion").trim() && !this.#form.elements.expansion.closest("label").hidden)
      asked.expansion = this.#value("expansion").trim();
    if (this.#value("verifier")) asked.verifier = this.#value("verifier");
    return asked;
  }

  #boxes() {
    return [...this.#form.querySelectorAll("[name=speculator]")];
  }

  #value(name) {
    return this.#form.elements[name].value;
  }

  #kept() {
    try {
      return JSON.parse(localStorage.getItem(STORE)) ?? USUAL;
    } catch {
      return USUAL;
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
  }

  #keep() {
    this.#server.key = this.#value("key").trim();
    this.#onkey();
  }

  #appear() {
    document.documentElement.dataset.appearance = this.#value("appearance");
  }
}
