// Coding agents, as people start them: one task that needs the shell, without a terminal.

import { execFileSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { MODEL, URL, check } from "./zoo.mjs";

const TASK = "Run the command and say what it printed.";
const LISTED = { name: MODEL, limit: { context: 131072, output: 8192 } };
const PROVIDER = { npm: "@ai-sdk/openai-compatible", name: "specinfer", options: { baseURL: URL, apiKey: "unused" } };
const CODEX = `model = "${MODEL}"
model_provider = "specinfer"
model_context_window = 131072

[model_providers.specinfer]
name = "specinfer"
base_url = "${URL}"
wire_api = "responses"
`;
const CONTINUE = `name: specinfer
version: 1.0.0
schema: v1
models:
  - name: specinfer
    provider: openai
    model: ${MODEL}
    apiBase: ${URL}
    apiKey: unused
    roles: [chat, edit, apply]
    capabilities: [tool_use]
`;
// The words of each agent's command; its variables; its files, in the home folder.
const AGENTS = {
  "claude-code": {
    words: ["claude", "-p", TASK, "--dangerously-skip-permissions"],
    variables: { ANTHROPIC_BASE_URL: process.env.ZOO_URL, ANTHROPIC_AUTH_TOKEN: "unused", IS_SANDBOX: "1" },
  },
  codex: {
    words: ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
    files: { ".codex/config.toml": CODEX },
  },
  opencode: {
    words: ["opencode", "run", TASK],
    variables: { OPENCODE_DISABLE_AUTOUPDATE: "1", OPENCODE_DISABLE_MODELS_FETCH: "1" },
    files: {
      "opencode.json": JSON.stringify({
        model: `specinfer/${MODEL}`,
        provider: { specinfer: { ...PROVIDER, models: { [MODEL]: LISTED } } },
      }),
    },
  },
  "qwen-code": {
    words: ["qwen", "-p", TASK, "--yolo"],
    // It asks the proxy for local addresses, too.
    variables: { OPENAI_BASE_URL: URL, OPENAI_API_KEY: "unused", OPENAI_MODEL: MODEL, ...noProxy() },
  },
  continue: { words: ["cn", "-p", TASK, "--config", "config.yaml", "--auto"], files: { "config.yaml": CONTINUE } },
};

function noProxy() {
  return Object.fromEntries(["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"].map((name) => [name, ""]));
}

const { words, variables = {}, files = {} } = AGENTS[process.argv[2]];
for (const [path, text] of Object.entries(files)) {
  if (path.includes("/")) mkdirSync(path.slice(0, path.lastIndexOf("/")), { recursive: true });
  writeFileSync(path, text);
}

await check("a command runs in its shell, and its output is in the answer", () => {
  const [program, ...rest] = words;
  const path = `${import.meta.dirname}/node_modules/.bin/${program}`;
  const env = { ...process.env, ...variables };
  const stdio = ["ignore", "pipe", "inherit"];
  const printed = execFileSync(path, rest, { env, stdio, encoding: "utf-8", timeout: 300_000 });
  console.log(printed);
  if (!printed.includes("The shell printed specinfer-42.")) throw new Error(`it printed ${printed.slice(-200)}`);
});
