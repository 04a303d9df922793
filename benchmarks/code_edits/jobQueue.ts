// Runs asynchronous jobs, a few at a time, in the order in which they came.

export interface QueueOptions {
  concurrency: number;
  onError?: (error: unknown, name: string) => void;
}

interface Job {
  name: string;
  run: () => Promise<void>;
  enqueuedAt: number;
}

export interface QueueStats {
  waiting: number;
  running: number;
  finished: number;
  failed: number;
}

export class JobQueue {
  private readonly waiting: Job[] = [];
  private running = 0;
  private finished = 0;
  private failed = 0;
  private paused = false;
  private idleCallbacks: Array<() => void> = [];

  constructor(private readonly options: QueueOptions) {
    if (options.concurrency < 1) {
      throw new RangeError(`concurrency is ${options.concurrency}, expected at least 1`);
    }
  }

  push(name: string, run: () => Promise<void>): void {
    this.waiting.push({ name, run, enqueuedAt: Date.now() });
    this.startNext();
  }

  pause(): void {
    this.paused = true;
  }

  resume(): void {
    this.paused = false;
    this.startNext();
  }

  stats(): QueueStats {
    return {
      waiting: this.waiting.length,
      running: this.running,
      finished: this.finished,
      failed: this.failed,
    };
  }

  // Milliseconds the job at the head of the queue has been waiting.
  oldestWait(): number {
    const head = this.waiting[0];
    return head ? Date.now() - head.enqueuedAt : 0;
  }

  whenIdle(): Promise<void> {
    if (this.isIdle()) {
      return Promise.resolve();
    }
    return new Promise((resolve) => this.idleCallbacks.push(resolve));
  }

  private isIdle(): boolean {
    return this.running === 0 && this.waiting.length === 0;
  }

  private startNext(): void {
    while (!this.paused && this.running < this.options.concurrency && this.waiting.length > 0) {
      const job = this.waiting.shift() as Job;
      this.running += 1;
      void this.execute(job);
    }
  }

  private async execute(job: Job): Promise<void> {
    try {
      await job.run();
      this.finished += 1;
    } catch (error) {
      this.failed += 1;
      this.options.onError?.(error, job.name);
    } finally {
      this.running -= 1;
      this.startNext();
      if (this.isIdle()) {
        this.idleCallbacks.splice(0).forEach((callback) => callback());
      }
    }
  }
}
