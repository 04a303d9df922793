// OpenAI's JavaScript client: answers, streams, tools, structured output, responses, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { check, holdsToWeather, LISBON, MODEL, refused, RIVERS, says, TOOL, URL, WEATHER } from "./zoo.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: "unused" });
const asked = { model: MODEL, messages: [{ role: "user", content: RIVERS }], max_tokens: 32, seed: 7 };
const lisbon = { model: MODEL, messages: [{ role: "user", content: LISBON }], max_tokens: 200, temperature: 0 };
const format = {
  type: "json_schema",
  json_schema: { name: "weather", strict: true, schema: WEATHER },
};

await check("a stream has the text of the whole answer", async () => {
  const whole = await client.chat.completions.create(asked);
  assert.equal(whole.choices[0].message.content, await says(RIVERS, { max_tokens: 32, seed: 7 }));
  let text = "";
  let usage;
  const stream = await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

await check("a tool is called, and its result is answered", async () => {
  let given;
  const weather = (read) => {
    given = read;
    return "21 degrees, sunny";
  };
  const runner = client.chat.completions.runTools({
    ...lisbon,
    tool_choice: "required",
    parallel_tool_calls: false,
    tools: [{ type: "function", function: { ...TOOL.function, function: weather, parse: JSON.parse } }],
  }, { maxChatCompletions: 2 });
  await runner.done();
  assert.ok(holdsToWeather(given));
  assert.ok(runner.messages.some((message) => message.role === "tool" && message.content.includes("sunny")));
});

await check("a streamed call is the whole call", async () => {
  const tools = { tools: [TOOL], tool_choice: { type: "function", function: { name: "weather" } } };
  const whole = await client.chat.completions.create({ ...lisbon, ...tools });
  const streamed = await client.chat.completions.stream({ ...lisbon, ...tools }).finalChatCompletion();
  const [call] = streamed.choices[0].message.tool_calls;
  assert.equal(call.function.arguments, whole.choices[0].message.tool_calls[0].function.arguments);
  assert.ok(holdsToWeather(JSON.parse(call.function.arguments)));
});

await check("a form is kept", async () => {
  const parsed = await client.chat.completions.parse({ ...lisbon, response_format: format });
  assert.ok(holdsToWeather(parsed.choices[0].message.parsed));
});

await check("a response is streamed", async () => {
  const input = { model: MODEL, input: RIVERS, temperature: 0, max_output_tokens: 32 };
  const whole = await client.responses.create(input);
  let text = "";
  for await (const event of await client.responses.create({ ...input, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  assert.equal(text, await says(RIVERS, { max_tokens: 32, temperature: 0 }));
});

await check("a stream that is left stops", async () => {
  const stream = await client.chat.completions.create({ ...asked, max_tokens: 4000, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

await check("errors are the client's own", async () => {
  const cold = client.chat.completions.create({ ...asked, temperature: -1 });
  await refused(OpenAI.BadRequestError, ["temperature"], cold);
  assert.equal((await client.chat.completions.create({ ...asked, model: "gpt-4o" })).model, asked.model);
});
