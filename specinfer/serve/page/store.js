// Store: conversations in the browser's database, or in memory where the browser has none for the page.

const NAME = "specinfer";
const VERSION = 1;
const WHOLE = "conversations"; // {id, title, created, updated, turns}
const TITLES = "titles"; // {id, title, updated}

export class Store {
  #database;
  #memory = new Map();
  #channel = new BroadcastChannel(NAME);

  // `onchange()` is called when another tab has changed something.
  constructor(onchange) {
    this.#database = opened().catch(() => null);
    this.#channel.onmessage = onchange;
  }

  // {id, title, updated} of all conversations, the newest first.
  async titles() {
    const found = (await this.#run("readonly", (at) => at(TITLES).getAll())) ?? [];
    const others = found.filter(({ id }) => !this.#memory.has(id));
    return [...others, ...this.#memory.values()].sort((a, b) => b.updated - a.updated);
  }

  // A conversation; undefined if there is none.
  async get(id) {
    return this.#memory.get(id) ?? (await this.#run("readonly", (at) => at(WHOLE).get(id))) ?? undefined;
  }

  async put(record) {
    const { id, title, updated } = record;
    const kept = await this.#run("readwrite", (at) => {
      at(TITLES).put({ id, title, updated });
      return at(WHOLE).put(record);
    });
    if (kept) this.#memory.delete(id);
    else this.#memory.set(id, record); // at least until the page is closed
    this.#channel.postMessage(id);
  }

  async remove(id) {
    await this.#run("readwrite", (at) => {
      at(TITLES).delete(id);
      return at(WHOLE).delete(id);
    });
    this.#memory.delete(id);
    this.#channel.postMessage(id);
  }

  // Result of a request in a transaction; null if the browser cannot store it.
  async #run(mode, ask) {
    const database = await this.#database;
    if (!database) return null;
    return new Promise((resolve) => {
      try {
        const transaction = database.transaction([WHOLE, TITLES], mode);
        const request = ask((name) => transaction.objectStore(name));
        transaction.oncomplete = () => resolve(request.result);
        transaction.onabort = () => resolve(null); // the disk or the quota is full
      } catch {
        resolve(null); // the browser has closed the database
      }
    });
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      for (const name of [WHOLE, TITLES]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error);
  });
}
