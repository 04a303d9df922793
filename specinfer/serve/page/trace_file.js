// Trace files of `specinfer generate --trace`: a line of JSON for each step.

import { download } from "./dom.js";
import { Step } from "./step.js";

// Read the steps of each request, in order: name -> events. Raises Error with the line number.
export function readTrace(text) {
  const requests = new Map();
  text.split(/\r?\n/).forEach((line, index) => {
    if (!line.trim()) return;
    let event;
    try {
      event = JSON.parse(line);
    } catch {
      throw new Error(`Line ${index + 1}: it is not JSON.`);
    }
    try {
      new Step(event);
    } catch (error) {
      throw new Error(`Line ${index + 1}: ${error.message}.`);
    }
    const name = event.request_id ?? "";
    if (!requests.has(name)) requests.set(name, []);
    requests.get(name).push(event);
  });
  if (!requests.size) throw new Error("The file has no steps.");
  return requests;
}

// Download the steps of an answer as a file.
export function saveTrace(answer, name) {
  download(answer.steps.map(({ event }) => `${JSON.stringify(event)}\n`).join(""), name, "application/jsonl");
}
