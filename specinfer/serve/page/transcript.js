// Transcript: a conversation as a file to keep or to read.

import { withFiles } from "./attachment.js";
import { download } from "./dom.js";

// Save a conversation as Markdown: the shown version of each answer.
export function saveMarkdown(record) {
  const turns = record.turns.map((turn) =>
    turn.role === "user"
      ? `## You\n\n${withFiles(turn.text, turn.files)}\n`
      : `## ${turn.versions[turn.at].model}\n\n${turn.versions[turn.at].text}\n`,
  );
  download([`# ${record.title}\n`, ...turns].join("\n"), `${fileName(record)}.md`, "text/markdown");
}

// Save a conversation as JSON, with all versions.
export function saveJson(record) {
  download(`${JSON.stringify(record, null, 2)}\n`, `${fileName(record)}.json`, "application/json");
}

function fileName({ title }) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40).toLowerCase() || "conversation";
}
