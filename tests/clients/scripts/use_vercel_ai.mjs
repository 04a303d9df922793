// Vercel's AI SDK: texts, streams, tools and structured output, with its providers for OpenAI and compatible servers.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { check, CITIES, LISBON, MODEL, refused, RIVERS, says, UNITS, URL } from "./zoo.mjs";

const compatible = createOpenAICompatible({
  name: "specinfer",
  baseURL: URL,
  apiKey: "unused",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: URL, apiKey: "unused" });
const models = [compatible(MODEL), openai.chat(MODEL), openai.responses(MODEL)];

const Weather = z.object({ city: z.enum(CITIES), warm: z.boolean() });
const asked = { prompt: RIVERS, maxOutputTokens: 32, temperature: 0, maxRetries: 0 };
const lisbon = { prompt: LISBON, maxOutputTokens: 200, temperature: 0, maxRetries: 0 };
const weather = tool({
  description: "Returns the weather of a city.",
  inputSchema: z.object({ city: z.enum(CITIES), unit: z.enum(UNITS) }),
  execute: async ({ city, unit }) => `21 degrees ${unit} in ${city}`,
});

// Force one call first, then an answer: a small model might call the tool forever.
const once = { type: "tool", toolName: "weather" };
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? once : "none" });

await check("a stream has the text of the whole answer", async () => {
  const plain = await says(RIVERS, { max_tokens: 32, temperature: 0 });
  for (const model of models) {
    const whole = await generateText({ ...asked, model });
    assert.equal(whole.text, plain);
    assert.equal(whole.finishReason, "length");
    const stream = streamText({ ...asked, model });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, plain);
    assert.equal((await stream.usage).outputTokens, 32);
  }
});

await check("a tool is called, and its result is answered", async () => {
  for (const model of models) {
    const done = await generateText({
      ...lisbon,
      model,
      tools: { weather },
      stopWhen: stepCountIs(2),
      prepareStep,
      providerOptions: { openai: { parallelToolCalls: false } },
    });
    assert.match(done.steps[0].toolResults[0].output, /^21 degrees/);
    assert.equal(done.steps.length, 2);
  }
});

await check("a tool is called in a stream", async () => {
  for (const model of models) {
    const toolChoice = { type: "tool", toolName: "weather" };
    const stream = streamText({ ...lisbon, model, tools: { weather }, toolChoice });
    let pieces = "";
    for await (const part of stream.fullStream) if (part.type === "tool-input-delta") pieces += part.delta;
    const [call] = await stream.toolCalls;
    assert.deepEqual(JSON.parse(pieces), call.input);
    assert.match((await stream.toolResults)[0].output, /^21 degrees/);
  }
});

await check("a form is an object of its schema", async () => {
  for (const model of models) {
    Weather.parse((await generateObject({ ...lisbon, model, schema: Weather })).object);
    Weather.parse((await generateText({ ...lisbon, model, output: Output.object({ schema: Weather }) })).output);
  }
});

await check("an object grows in a stream", async () => {
  for (const model of models) {
    const stream = streamObject({ ...lisbon, model, schema: Weather });
    let last;
    for await (const part of stream.partialObjectStream) last = part;
    assert.deepEqual(last, Weather.parse(await stream.object));
  }
});

await check("whole numbers and bounds of Zod are read", async () => {
  const schema = z.object({ days: z.number().int().min(1).max(7), share: z.number().nonnegative().max(1) });
  for (const model of models) schema.parse((await generateObject({ ...lisbon, model, schema })).object);
});

await check("tools and a form go together", async () => {
  for (const model of models) {
    const output = Output.object({ schema: Weather });
    const done = await generateText({ ...lisbon, model, tools: { weather }, output, stopWhen: stepCountIs(2), prepareStep });
    assert.match(done.steps[0].toolResults[0].output, /^21 degrees/);
    Weather.parse(done.output);
  }
});

await check("errors are the client's own", async () => {
  for (const model of models) await refused(APICallError, ["top_p"], generateText({ ...asked, model, topP: 3 }));
});
