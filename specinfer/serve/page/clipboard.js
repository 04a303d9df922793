// Clipboard: copies text, also where the browser has no clipboard for pages without HTTPS.

import { button, element } from "./dom.js";

const SHOWN = 1500; // milliseconds for which a button says that it copied

// Copy a text; resolves to whether it worked.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text); // no clipboard unless the page is localhost or HTTPS
    return true;
  } catch {
    return copySelected(text);
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const words = element("textarea", { class: "visually-hidden", "aria-hidden": "true", readonly: true });
  words.value = text;
  (focused?.closest("dialog") ?? document.body).append(words);
  words.select();
  const copied = document.execCommand("copy");
  words.remove();
  focused?.focus({ preventScroll: true });
  return copied;
}

// A button that copies the text that `text()` returns, and says so.
export function copyButton(label, text, properties = {}) {
  const status = document.getElementById("status");
  const made = button(label, async () => {
    const said = (await copyText(text())) ? "Copied" : "Copying failed";
    status.textContent = `${said}.`;
    made.textContent = said;
    setTimeout(() => (made.textContent = label), SHOWN);
  }, properties);
  return made;
}
