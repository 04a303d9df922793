// Main module: creates the parts of the page and connects them.

import { Answer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { Inspector } from "./inspector.js";
import { Note } from "./note.js";
import { plural } from "./step.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { readTrace } from "./trace_file.js";

const NEAR = 80; // pixels from the end within which the page scrolls with new text

const at = (id) => document.getElementById(id);
const [main, model, words, composer, status] = ["main", "model", "words", "composer", "status"].map(at);
const server = new Server();
const settings = new Settings(at("settings"), server, () => (met = meet()));
const note = new Note(at("note"));
const inspector = new Inspector(at("inspector"), announce);
// `specinfer view` serves a trace without a model; its address has the trace's name.
const viewed = new URLSearchParams(location.search).get("trace");

const page = {
  element: at("messages"),
  server,
  settings,
  inspector,
  note,
  announce,
  follow,
  inspect: (answer, index, from) => inspector.open(answer, index, from),
  focus: () => words.focus(),
  model: () => model.value,
  onchange,
};
const conversation = new Conversation(page);

function announce(text) {
  status.textContent = text;
}

// Keep the end of the text in view unless the user has scrolled up.
let followed = true;
let due = false;
let top = 0;
main.addEventListener("scroll", () => {
  if (main.scrollHeight - main.scrollTop - main.clientHeight < NEAR) followed = true;
  else if (main.scrollTop < top) followed = false; // the text did not only grow
  top = main.scrollTop;
});
function follow(always = false) {
  if (always) followed = true;
  if (!followed || due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    main.scrollTop = main.scrollHeight;
  });
}

function onchange() {
  const { busy } = conversation;
  const focused = document.activeElement;
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  document.body.classList.toggle("busy", busy);
  at("welcome").hidden = !conversation.empty;
  if (focused && focused !== document.body && !focused.checkVisibility()) words.focus();
}

// Load the models of the server; if that needs an API key, show a message.
let met = Promise.resolve();
async function meet() {
  try {
    const cards = await server.models();
    const chosen = model.value;
    model.replaceChildren(...cards.map(({ id }) => new Option(id, id)));
    if (cards.some(({ id }) => id === chosen)) model.value = chosen;
    settings.offer(cards[0]);
    complain("");
  } catch (error) {
    if (error.status === 401) complain("The server requires an API key; enter it in the settings.");
    else complain(error.message);
  }
}

function complain(text) {
  at("trouble").textContent = text;
  at("trouble").hidden = !text;
}

function showTrace(name, text) {
  let requests;
  try {
    requests = readTrace(text);
  } catch (error) {
    complain(`${name} cannot be shown. ${error.message}`);
    return;
  }
  complain("");
  inspector.close();
  const container = at("trace");
  const answers = [...requests.values()].map((events, number) => {
    const label = requests.size > 1 ? `Answer ${number + 1}` : "Answer";
    const answer = new Answer(label, page, { timed: false });
    answer.add(events);
    answer.placeTokens();
    answer.finish();
    return answer;
  });
  container.replaceChildren(...answers.map((answer) => answer.element));
  const steps = answers.reduce((sum, answer) => sum + answer.steps.length, 0);
  at("trace-name").textContent = name;
  at("trace-size").textContent = `${plural(answers.length, "answer")}, ${plural(steps, "step")}`;
  mode("trace");
  answers[0].inspect.click();
}

function mode(name) {
  document.body.dataset.mode = name;
  inspector.close();
  followed = false;
}

async function openFile(file) {
  if (file) showTrace(file.name, await file.text());
}

composer.addEventListener("submit", async (event) => {
  event.preventDefault();
  await met; // a request needs the name of a model
  const text = words.value.trim();
  if (!text || conversation.busy) return;
  if (!settings.valid) return settings.open();
  words.value = "";
  conversation.send(text);
});
at("examples").addEventListener("click", (event) => {
  const example = event.target.closest("button");
  if (!example) return;
  words.value = example.textContent;
  composer.requestSubmit();
});
words.addEventListener("keydown", (event) => {
  if (event.key === "Escape") conversation.stop();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  composer.requestSubmit();
});
at("stop").addEventListener("click", () => conversation.stop());
at("new").addEventListener("click", () => {
  conversation.clear();
  mode("chat");
  words.focus();
});
at("back").addEventListener("click", () => {
  mode("chat");
  words.focus();
});
at("open-settings").addEventListener("click", () => settings.open());
at("open-trace").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", (event) => {
  openFile(event.target.files[0]);
  event.target.value = "";
});

addEventListener("dragover", (event) => {
  if (![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  openFile(event.dataTransfer.files[0]);
});

if (viewed === null) {
  mode("chat");
  onchange();
  met = meet();
  words.focus();
} else {
  document.body.classList.add("viewer");
  document.title = `${viewed} - specinfer`;
  const response = await fetch("trace.jsonl").catch(() => null);
  if (response?.ok) showTrace(viewed, await response.text());
  else complain("The trace cannot be read: `specinfer view` is no longer running.");
}
