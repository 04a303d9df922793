// Attachments: files that go with a message as text.

import { button, element } from "./dom.js";

const LARGEST = 2 << 20; // bytes; a context of 128 Ki tokens has about a quarter of that

// Read a file; raises Error if it is not text, or too large.
export async function readAttachment(file) {
  if (file.size > LARGEST)
    throw new Error(`${file.name} has ${sizeOf(file.size)}; a file may have at most ${sizeOf(LARGEST)}.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not text in UTF-8; attach a text file.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not text; attach a text file.`);
  return { name: file.name, text: text.replace(/\r\n?/g, "\n") };
}

// The text of a message with its files in front, each in a code block.
export function withFiles(text, files) {
  const parts = files.map(({ name, text: body }) => {
    const longest = [...body.matchAll(/`{3,}/g)].reduce((most, [fence]) => Math.max(most, fence.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${body.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

// A file as a box that unfolds; with `remove`, a button takes it away.
export function fileChip({ name, text }, remove = null) {
  const size = sizeOf(new Blob([text]).size);
  if (remove)
    return element(
      "span",
      { class: "file" },
      element("span", { class: "file-name", text: name }),
      element("small", { text: size }),
      button("\u00d7", remove, { "aria-label": `Remove ${name}` }),
    );
  return element(
    "details",
    { class: "file" },
    element("summary", {}, element("span", { class: "file-name", text: name }), " ", element("small", { text: size })),
    element("pre", { text, tabindex: "0" }),
  );
}

function sizeOf(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  return bytes < 1 << 20 ? `${Math.round(bytes / 1024)} KB` : `${(bytes / (1 << 20)).toFixed(1)} MB`;
}
