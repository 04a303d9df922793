// Holds the to-do items of the page and tells the views when they change.

export interface Todo {
  id: number;
  title: string;
  done: boolean;
  createdAt: Date;
}

export type Filter = "all" | "open" | "done";

type Listener = (todos: readonly Todo[]) => void;

export class TodoStore {
  private todos: Todo[] = [];
  private nextId = 1;
  private listeners: Listener[] = [];

  constructor(private readonly now: () => Date = () => new Date()) {}

  add(title: string): Todo {
    const trimmed = title.trim();
    if (trimmed === "") {
      throw new Error("A to-do needs a title");
    }
    const todo: Todo = { id: this.nextId++, title: trimmed, done: false, createdAt: this.now() };
    this.todos = [...this.todos, todo];
    this.notify();
    return todo;
  }

  toggle(id: number): void {
    this.todos = this.todos.map((todo) =>
      todo.id === id ? { ...todo, done: !todo.done } : todo
    );
    this.notify();
  }

  rename(id: number, title: string): void {
    this.todos = this.todos.map((todo) => (todo.id === id ? { ...todo, title } : todo));
    this.notify();
  }

  remove(id: number): void {
    this.todos = this.todos.filter((todo) => todo.id !== id);
    this.notify();
  }

  clearFinished(): number {
    const before = this.todos.length;
    this.todos = this.todos.filter((todo) => !todo.done);
    this.notify();
    return before - this.todos.length;
  }

  visible(filter: Filter): readonly Todo[] {
    switch (filter) {
      case "open":
        return this.todos.filter((todo) => !todo.done);
      case "done":
        return this.todos.filter((todo) => todo.done);
      default:
        return this.todos;
    }
  }

  get openCount(): number {
    return this.todos.filter((todo) => !todo.done).length;
  }

  subscribe(listener: Listener): () => void {
    this.listeners.push(listener);
    listener(this.todos);
    return () => {
      this.listeners = this.listeners.filter((known) => known !== listener);
    };
  }

  private notify(): void {
    for (const listener of this.listeners) {
      listener(this.todos);
    }
  }
}
