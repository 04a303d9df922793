// Trace files: a line of JSON for each step, as `specinfer generate --trace` writes them.

import { Step } from "./step.js";

// The steps of each request, in the order they came: name -> events. Raises Error, with the line's number.
export function readTrace(text) {
  const requests = new Map();
  text.split(/\r?\n/).forEach((line, place) => {
    if (!line.trim()) return;
    let event;
    try {
      event = JSON.parse(line);
    } catch {
      throw new Error(`Line ${place + 1}: it is not JSON.`);
    }
    try {
      new Step(event);
    } catch (error) {
      throw new Error(`Line ${place + 1}: ${error.message}.`);
    }
    const name = event.request_id ?? "";
    if (!requests.has(name)) requests.set(name, []);
    requests.get(name).push(event);
  });
  if (!requests.size) throw new Error("It has no steps.");
  return requests;
}

// Hand the steps of an answer to whoever sits there, as a file.
export function saveTrace(answer, name) {
  const text = answer.steps.map(({ event }) => `${JSON.stringify(event)}\n`).join("");
  const address = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address));
}
