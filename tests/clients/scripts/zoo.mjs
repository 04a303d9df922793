// Helpers for scripts of JavaScript clients: the server's URL, and checks that report to the runner.

import { appendFileSync } from "node:fs";

export const URL = process.env.ZOO_URL + "/v1";
export const MODEL = process.env.ZOO_MODEL;
export const RIVERS = "Name three rivers of Europe.";
export const LISBON = "What is the weather in Lisbon?";
// A small model may not end a free text, so fields are enumerations.
export const CITIES = ["Lisbon", "Porto"];
export const UNITS = ["celsius", "fahrenheit"];
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES }, unit: { type: "string", enum: UNITS } },
  required: ["city", "unit"],
  additionalProperties: false,
};
export const TOOL = {
  type: "function",
  function: { name: "weather", description: "Returns the weather of a city.", parameters: WEATHER },
};

/** Run a check and report its outcome. */
export async function check(title, body) {
  const outcome = { check: title, passed: true, note: "" };
  try {
    await body();
  } catch (error) {
    console.error(error);
    outcome.passed = false;
    outcome.note = `${error.name}: ${error.message}`.split(/\s+/).join(" ");
  }
  report(outcome);
}

/** The server refuses what the promise asks, and it fails with an error of `kind` that has these words. */
export async function refused(kind, words, promise) {
  try {
    await promise;
  } catch (error) {
    if (!(error instanceof kind)) throw error;
    expectRefusal();
    for (const word of words) if (!error.message.includes(word)) throw error;
    return;
  }
  throw new Error("nothing was refused");
}

/** The server has refused what a check meant it to. */
export function expectRefusal() {
  report({ refused: 1 });
}

/** What the model answers to one question, without a client. */
export async function says(question, fields) {
  const body = JSON.stringify({ model: MODEL, messages: [{ role: "user", content: question }], ...fields });
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(URL + "/chat/completions", { method: "POST", headers, body });
  report({ plain: answer.headers.get("X-Request-Id") });
  return (await answer.json()).choices[0].message.content;
}

/** Whether arguments of the tool are what its schema asks for. */
export function holdsToWeather(read) {
  const keys = Object.keys(read).sort().join();
  return keys === "city,unit" && CITIES.includes(read.city) && UNITS.includes(read.unit);
}

function report(line) {
  appendFileSync(process.env.ZOO_REPORT, JSON.stringify(line) + "\n");
}
