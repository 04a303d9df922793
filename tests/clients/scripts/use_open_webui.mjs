// The calls of Open WebUI, whose package takes gigabytes: the list of models, a streamed chat with a tool of the
// user's in two rounds, and the title of the chat.

import { MODEL, URL, check } from "./zoo.mjs";

const KEY = { Authorization: "Bearer unused", "Content-Type": "application/json" };
const QUESTION = { role: "user", content: "Run the command and say what it printed." };
const SHELL = {
  type: "function",
  function: {
    name: "bash",
    description: "Runs a command.",
    parameters: { type: "object", properties: { command: { type: "string" } }, required: ["command"] },
  },
};

async function post(fields) {
  const body = JSON.stringify({ model: MODEL, ...fields });
  const answer = await fetch(URL + "/chat/completions", { method: "POST", headers: KEY, body });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer;
}

/** The text and the calls of a streamed answer. */
async function streamed(messages) {
  const answer = await post({ messages, tools: [SHELL], stream: true, stream_options: { include_usage: true } });
  const found = { text: "", calls: [] };
  for (const line of (await answer.text()).split("\n")) {
    if (!line.startsWith("data: {")) continue;
    const delta = JSON.parse(line.slice(6)).choices[0]?.delta ?? {};
    found.text += delta.content ?? "";
    for (const { index, id, function: part } of delta.tool_calls ?? []) {
      found.calls[index] ??= { id, name: part.name, arguments: "" };
      found.calls[index].arguments += part.arguments ?? "";
    }
  }
  return found;
}

await check("the model is listed", async () => {
  const { data } = await (await fetch(URL + "/models", { headers: KEY })).json();
  if (data[0].id !== MODEL) throw new Error(`it lists ${data[0].id}`);
});

await check("a tool is called, and its result is in the answer", async () => {
  const { calls: [call] } = await streamed([QUESTION]);
  const { command } = JSON.parse(call.arguments);
  if (!command.startsWith("echo")) throw new Error(`it calls ${call.arguments}`);
  const called = { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } };
  const said = { role: "assistant", content: "", tool_calls: [called] };
  const result = { role: "tool", tool_call_id: call.id, content: "specinfer-42" };
  const { text } = await streamed([QUESTION, said, result]);
  if (text !== "The shell printed specinfer-42.") throw new Error(`it says ${text}`);
});

await check("a chat gets a title", async () => {
  const messages = [{ role: "user", content: "Generate a concise title." }];
  const { choices } = await (await post({ messages, stream: false, max_completion_tokens: 1000 })).json();
  if (!choices[0].message.content) throw new Error("it is empty");
});
