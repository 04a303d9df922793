// Main module: creates the parts of the page and connects them.

import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { ConversationList } from "./conversation_list.js";
import { Inspector } from "./inspector.js";
import { Note } from "./note.js";
import { plural } from "./step.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Scroll } from "./scroll.js";
import { Side } from "./side.js";
import { Store } from "./store.js";
import { readTrace } from "./trace_file.js";

const RETRY = 3000; // milliseconds until a server that did not answer is asked again
const MARKS = "specinfer.marks";

const at = (id) => document.getElementById(id);
const [model, marks, status] = ["model", "marks", "status"].map(at);
const server = new Server();
const settings = new Settings(at("settings"), server, { onkey: () => (met = meet()), onchange: mark });
const note = new Note(at("note"));
const inspector = new Inspector(at("inspector"), announce);
const store = new Store(() => list.refresh());
const scroll = new Scroll(at("main"));
const side = new Side(at("side"), at("toggle-side"), at("shade"));
const composer = new Composer(at("composer"), { onsend, onstop: () => conversation.stop() });
const list = new ConversationList(
  { store, onrename, ondelete },
  { list: at("list"), menu: at("menu"), confirm: at("confirm") },
);
const deleted = new Set(); // ids of conversations; an answer of one may still end

const page = {
  element: at("messages"),
  server,
  settings,
  inspector,
  note,
  announce,
  follow: (always) => scroll.follow(always),
  inspect: (answer, index, from) => inspector.open(answer, index, from),
  focus: () => composer.focus(),
  model: () => model.value,
  marking: () => ({ on: marks.checked, inCode: settings.inCode }),
  notice: (...said) => composer.notice(...said),
  giveBack: (text, files) => composer.giveBack(text, files),
  gone: () => (again ??= setTimeout(() => (met = meet()), RETRY)),
  keep,
  onchange,
};
const conversation = new Conversation(page);

function announce(text) {
  status.textContent = text;
}

function onchange() {
  const { busy } = conversation;
  const focused = document.activeElement;
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  document.body.classList.toggle("busy", busy);
  at("welcome").hidden = !conversation.empty;
  if (focused && focused !== document.body && !focused.checkVisibility()) composer.focus();
}

function mark() {
  document.documentElement.classList.toggle("marks", marks.checked);
  conversation.mark();
}

// Load the models of the server; while it does not answer, try again.
let met = Promise.resolve();
let again = null;
async function meet() {
  clearTimeout(again);
  again = null;
  try {
    const cards = await server.models();
    const chosen = model.value;
    model.replaceChildren(...cards.map(({ id }) => new Option(id, id)));
    if (cards.some(({ id }) => id === chosen)) model.value = chosen;
    settings.offer(cards.find(({ id }) => id === model.value));
    composer.settled();
  } catch (error) {
    const needsKey = error.status === 401;
    composer.notice(needsKey ? "The server requires an API key; enter it in the settings." : error.message, true);
    if (error.status === 0) page.gone();
  }
}

async function onsend(text, files) {
  const { id } = conversation.record;
  await met; // a request needs the name of a model
  if (!model.value) await (met = meet());
  if (conversation.busy || id !== conversation.record.id) return false;
  if (!settings.valid) {
    settings.open();
    return false;
  }
  composer.id = id;
  history.replaceState(null, "", `#${id}`);
  conversation.send(text, files);
  return true;
}

// Store a conversation; one without turns, whose only message was refused, is removed.
async function keep(record) {
  if (deleted.has(record.id)) return;
  const current = record === conversation.record;
  if (current) entitle(record);
  if (record.turns.length) await store.put(record);
  else {
    await store.remove(record.id);
    if (current) forgetAddress();
  }
  await list.refresh(conversation.empty ? null : conversation.record.id);
}

function forgetAddress() {
  history.replaceState(null, "", location.pathname);
  composer.id = "new";
}

function entitle({ title }) {
  document.title = title ? `${title} - specinfer` : "specinfer";
}

// Show the conversation that the address names, or a new one.
async function show() {
  const id = location.hash.slice(1);
  if (id === conversation.record.id) return;
  const record = id ? await store.get(id) : undefined;
  if (id !== location.hash.slice(1)) return; // another one was chosen
  if (id && !record) forgetAddress();
  mode("chat");
  conversation.open(record);
  composer.open(record?.id);
  entitle(conversation.record);
  side.close();
  await list.refresh(record?.id ?? null);
}

function begin() {
  if (location.hash) history.pushState(null, "", location.pathname);
  mode("chat");
  conversation.open();
  composer.open(null);
  entitle(conversation.record);
  side.close();
  list.refresh(null);
  composer.focus();
}

async function onrename(id, title) {
  const record = id === conversation.record.id ? conversation.record : await store.get(id);
  if (!record) return;
  record.title = title;
  await store.put(record);
  if (record === conversation.record) entitle(record);
}

async function ondelete(id) {
  deleted.add(id);
  Composer.forget(id);
  if (id === conversation.record.id) begin();
  await store.remove(id);
  await list.refresh();
  announce("Deleted.");
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
    const answer = new Answer(label, page);
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
  complain("");
  inspector.close();
  scroll.hold();
}

// A dropped file is a trace, or goes with the message.
async function dropped(files) {
  const [file] = files;
  if (document.body.dataset.mode === "trace" || isTrace(await file.slice(0, 1 << 20).text()))
    showTrace(file.name, await file.text());
  else composer.attach(files);
}

function isTrace(text) {
  try {
    return readTrace(text.split("\n", 1)[0]).size > 0;
  } catch {
    return false;
  }
}

at("examples").addEventListener("click", (event) => {
  const example = event.target.closest("button");
  if (example) composer.fill(example.textContent);
});
at("stop").addEventListener("click", () => conversation.stop());
at("new").addEventListener("click", begin);
at("back").addEventListener("click", () => {
  mode("chat");
  composer.focus();
});
at("open-settings").addEventListener("click", () => settings.open());
for (const one of document.querySelectorAll(".open-trace"))
  one.addEventListener("click", () => {
    side.close();
    at("file").click();
  });
at("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (file) showTrace(file.name, await file.text());
  target.value = "";
});
marks.checked = localStorage.getItem(MARKS) === "on";
model.addEventListener("change", () => (met = meet()));

marks.addEventListener("change", () => {
  localStorage.setItem(MARKS, marks.checked ? "on" : "off");
  mark();
});
addEventListener("hashchange", show);
// Another tab may have gone on with the conversation.
addEventListener("focus", async () => {
  const { record } = conversation;
  const kept = await store.get(record.id);
  if (kept?.updated > record.updated && !conversation.busy && record === conversation.record) conversation.open(kept);
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
  dropped(event.dataTransfer.files).catch(() => composer.notice("This cannot be read; drop files, not folders."));
});

mark();
mode("chat");
onchange();
met = meet();
composer.open(null);
composer.focus();
await show();
await list.refresh();
