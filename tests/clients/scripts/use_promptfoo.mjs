// promptfoo: a test plan of prompts, with its assertions, run by its command line.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { check, CITIES, expectRefusal, LISBON, MODEL, RIVERS, says, TOOL, URL, WEATHER } from "./zoo.mjs";

const config = { apiBaseUrl: URL, apiKey: "unused", temperature: 0, max_tokens: 32 };
const provider = (more) => ({ id: `openai:chat:${MODEL}`, config: { ...config, ...more } });

/** The results of a plan. */
function evaluate(plan) {
  writeFileSync("plan.json", JSON.stringify(plan));
  const program = fileURLToPath(new globalThis.URL("./node_modules/promptfoo/dist/src/main.js", import.meta.url));
  const words = [program, "eval", "-c", "plan.json", "-o", "results.json", "--no-cache", "--no-table", "--no-write"];
  try {
    execFileSync(process.execPath, words, { stdio: "inherit" });
  } catch (error) {
    if (error.status !== 100) throw error; // status 100: an assertion of the plan failed
  }
  return JSON.parse(readFileSync("results.json", "utf8")).results.results;
}

await check("prompts are answered and asserted on", async () => {
  const plan = {
    prompts: ["Name three rivers of {{place}}."],
    providers: [provider(), { id: `openai:responses:${MODEL}`, config: { ...config, max_output_tokens: 32 } }],
    tests: [{ vars: { place: "Europe" }, assert: [{ type: "contains", value: "Danube" }] }],
  };
  const results = evaluate(plan);
  assert.equal(results.length, 2);
  const plain = await says(RIVERS, { max_tokens: 32, temperature: 0 });
  for (const result of results) {
    assert.ok(result.success, result.error);
    assert.equal(result.response.output, plain);
  }
  assert.equal(results[0].response.tokenUsage.completion, 32);
});

await check("a form and a call are checked against their schemas", async () => {
  const json_schema = { name: "weather", strict: true, schema: WEATHER };
  const form = provider({ max_tokens: 200, response_format: { type: "json_schema", json_schema } });
  const call = provider({ max_tokens: 200, tools: [TOOL], tool_choice: { type: "function", function: { name: "weather" } } });
  const kept = { type: "is-json", value: WEATHER };
  const called = { type: "is-valid-openai-tools-call" };
  const ask = (one, assertion) => evaluate({ prompts: [LISBON], providers: [one], tests: [{ assert: [assertion] }] })[0];
  assert.ok(ask(form, kept).success);
  const result = ask(call, called);
  assert.ok(result.success, result.error);
  assert.ok(CITIES.includes(JSON.parse(result.response.output[0].function.arguments).city));
});

await check("an error is reported", async () => {
  const [result] = evaluate({ prompts: [LISBON], providers: [provider({ response_format: { type: "xml" } })], tests: [{ vars: {} }] });
  expectRefusal();
  assert.equal(result.success, false);
  assert.match(result.error, /response_format/);
});
