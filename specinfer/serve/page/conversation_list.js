// ConversationList: titles of the stored conversations, each with a menu to rename, export and delete it.

import { button, element, svg } from "./dom.js";
import { saveJson, saveMarkdown } from "./transcript.js";

export class ConversationList {
  #list;
  #menu;
  #confirm;
  #page;
  #chosen = null; // {id, title, item} that the menu is open for
  #current = null;
  #shown = ""; // the titles and the current conversation, as JSON

  // `page` has store, onrename(id, title), ondelete(id).
  constructor(page, { list, menu, confirm }) {
    this.#page = page;
    this.#list = list;
    this.#menu = menu;
    this.#confirm = confirm;
    menu.append(
      button("Rename", () => this.#act(() => this.#rename())),
      button("Export as Markdown", () => this.#act(({ id }) => this.#export(id, saveMarkdown))),
      button("Export as JSON", () => this.#act(({ id }) => this.#export(id, saveJson))),
      button("Delete\u2026", () => this.#act((chosen) => this.#ask(chosen)), { class: "danger" }),
    );
    menu.addEventListener("toggle", ({ newState }) => newState === "closed" && this.refresh());
    menu.addEventListener("keydown", (event) => this.#keyed(event));
    confirm.addEventListener("close", () => confirm.returnValue === "delete" && page.ondelete(this.#chosen.id));
  }

  // Read the titles again and mark the current conversation.
  async refresh(current = this.#current) {
    this.#current = current;
    const titles = await this.#page.store.titles();
    if (this.#list.querySelector("input") || this.#menu.matches(":popover-open")) return; // they belong to an item
    const shown = JSON.stringify([this.#current, titles.map(({ id, title }) => [id, title])]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    const focused = this.#list.contains(document.activeElement) && document.activeElement.dataset.key;
    this.#list.replaceChildren(...titles.map((one) => this.#item(one)));
    if (focused) this.#list.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  #item({ id, title }) {
    const item = element("li", {});
    const link = element("a", {
      href: `#${id}`,
      text: title,
      title,
      "data-key": id,
      "aria-current": id === this.#current ? "page" : null,
    });
    const more = button("", () => this.#open({ id, title, item, more }), {
      class: "more",
      "aria-label": `More for ${title}`,
      "aria-haspopup": "true",
      "data-key": `more-${id}`,
    });
    const dots = svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" });
    for (const cx of [3, 8, 13]) dots.append(svg("circle", { cx, cy: 8, r: 1.4 }));
    more.append(dots);
    item.append(link, more);
    return item;
  }

  #open(chosen) {
    this.#chosen = chosen;
    this.#menu.showPopover();
    const { bottom, top, right } = chosen.more.getBoundingClientRect();
    const { width, height } = this.#menu.getBoundingClientRect();
    this.#menu.style.left = `${Math.max(8, Math.min(right - width, innerWidth - width - 8))}px`;
    this.#menu.style.top = `${bottom + height < innerHeight ? bottom : top - height}px`;
    this.#menu.querySelector("button").focus();
  }

  #keyed(event) {
    const all = [...this.#menu.querySelectorAll("button")];
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    all.at((all.indexOf(document.activeElement) + by) % all.length).focus();
    event.preventDefault();
  }

  #act(act) {
    this.#menu.hidePopover();
    act(this.#chosen);
  }

  async #export(id, save) {
    save(await this.#page.store.get(id));
  }

  #rename() {
    const { id, title, item, more } = this.#chosen;
    const name = element("input", { "aria-label": "Name of the conversation", maxlength: 200 });
    name.value = title;
    let done = false;
    const end = async (kept, focused = true) => {
      if (done) return;
      done = true;
      const written = name.value.trim();
      name.remove();
      if (kept && written && written !== title) await this.#page.onrename(id, written);
      this.#shown = ""; // the item has lost its link
      await this.refresh();
      if (focused) this.#list.querySelector(`[data-key="more-${id}"]`)?.focus();
    };
    name.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      else if (event.key === "Escape") end(false);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    name.addEventListener("blur", () => end(true, false));
    item.replaceChildren(name, more);
    name.select();
  }

  #ask({ title }) {
    this.#confirm.querySelector("strong").textContent = title;
    this.#confirm.returnValue = "";
    this.#confirm.showModal();
  }
}
