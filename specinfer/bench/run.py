"""Running the same conversations without and with speculation, side by side.

Both engines share one process and the same loaded weights. A machine's speed drifts (other users, clock,
temperature), so the two take turns: a group of conversations runs on one engine, then on the other, and
which goes first alternates from group to group. A group is one conversation at batch size 1 and four times
the batch size above: at its end fewer requests than the batch size are in flight, for both alike.

Load is closed: `batch_size` users each have one request in flight and ask the next when the answer is
there, so time to first token holds no waiting in a queue. Both engines warm up before anything is counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil
import torch

from specinfer.engine.admission import Admitted
from specinfer.engine.steps import Statistics
from specinfer.errors import RequestError
from specinfer.llm import LLM
from specinfer.report.dataset import Conversation, Dataset
from specinfer.request import Delta, RequestOutput, SpeculationFigures
from specinfer.sampling_params import SamplingParams

Key = tuple[int, int]  # conversation, turn
_WARM_UP_TOKENS = 16
_GROUP = 4  # batch sizes in a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How the conversations are held."""

    params: SamplingParams  # its seed is the first request's; every request has one of its own
    batch_size: int = 1  # requests in flight
    chat: bool = True  # through the chat template

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise RequestError(f"batch size is {self.batch_size}; allowed: an integer >= 1")


@dataclass(slots=True)
class EngineRun:
    """What one engine did with all conversations."""

    outputs: dict[Key, RequestOutput] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    seconds: float = 0.0  # requests in flight, all groups together
    done: Statistics = field(default_factory=Statistics)  # meanwhile, by the engine
    peak_memory: int = 0  # bytes: of the GPU allocator, or of the whole process on a CPU
    group_rates: list[float] = field(default_factory=list)  # output tokens per second, group by group

    @property
    def total_input(self) -> int:
        """Prompt tokens of all answered requests."""
        return sum(len(o.prompt_token_ids) for o in self.outputs.values())

    @property
    def total_output(self) -> int:
        """Tokens of all answers."""
        return sum(len(o.token_ids) for o in self.outputs.values())

    @property
    def output_throughput(self) -> float:
        """Output tokens per second, prefills included."""
        return self.total_output / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of all answers by the target's passes, those that read prompts included."""
        return self.total_output / self.done.steps

    @property
    def figures(self) -> SpeculationFigures:
        """Speculation figures of all requests, added up."""
        total = SpeculationFigures()
        for output in self.outputs.values():
            total.add(output.figures)
        return total


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests without and with speculation."""

    baseline: EngineRun
    speculative: EngineRun
    busy_elsewhere: float  # cores that other programs kept busy meanwhile, on average

    @property
    def speedup(self) -> float:
        """Output throughput with speculation over without."""
        return self.speculative.output_throughput / self.baseline.output_throughput

    @property
    def group_speedups(self) -> list[float]:
        """The same for each group of conversations that both runs answered: how steady the figure is."""
        pairs = zip(self.baseline.group_rates, self.speculative.group_rates, strict=True)
        return [theirs / ours for ours, theirs in pairs if ours and theirs]

    @property
    def pairs(self) -> Mapping[Key, tuple[RequestOutput, RequestOutput]]:
        """Both answers to each request that has two."""
        theirs = self.speculative.outputs
        return {key: (ours, theirs[key]) for key, ours in self.baseline.outputs.items() if key in theirs}

    @property
    def identical(self) -> int:
        """Requests with the same text in both runs."""
        return sum(ours.text == theirs.text for ours, theirs in self.pairs.values())


def compare(
    baseline: LLM,
    speculative: LLM,
    dataset: Dataset,
    load: Load,
    *,
    on_request: Callable[[], None] = lambda: None,
) -> Comparison:
    """Hold every conversation on both engines; `on_request` is called when a request is over.

    Raises RequestError when no request of an engine could be served.
    """
    sides = [_Bench(llm, load, dataset) for llm in (baseline, speculative)]
    for side in sides:
        side.warm_up()
    began, busy = time.perf_counter(), _busy_elsewhere()
    for number, group in enumerate(_groups(dataset, load.batch_size)):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.hold(group, on_request)
    seconds = time.perf_counter() - began
    elsewhere = max((_busy_elsewhere() - busy) / seconds, 0.0)
    return Comparison(sides[0].finish(), sides[1].finish(), elsewhere)


def _busy_elsewhere() -> float:
    """CPU seconds so far that this process did not use, those of other guests on the machine included."""
    everybody, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = everybody.idle + getattr(everybody, "iowait", 0.0)
    counted = sum(everybody) - getattr(everybody, "guest", 0.0) - getattr(everybody, "guest_nice", 0.0)
    return float(counted - idle - own.user - own.system)


def _groups(dataset: Dataset, batch_size: int) -> Iterator[Sequence[int]]:
    size = 1 if batch_size == 1 else _GROUP * batch_size
    indices = range(len(dataset.conversations))
    return (indices[start : start + size] for start in range(0, len(indices), size))


@dataclass(slots=True)
class _Talk:
    """One conversation under way."""

    index: int
    conversation: Conversation
    turn: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.index, self.turn


class _Bench:
    """One engine at work on the conversations."""

    def __init__(self, llm: LLM, load: Load, dataset: Dataset) -> None:
        self._llm = llm
        self._load = load
        self._conversations = dataset.conversations
        turns = [0]
        for conversation in self._conversations:
            turns.append(turns[-1] + len(conversation.turns))
        self._request_number = turns  # of a conversation's first turn
        self._run = EngineRun()
        self._process = psutil.Process()
        self._gpu = llm.models.target.device.type == "cuda"

    def warm_up(self) -> None:
        """Answer the first question once, shortly, and forget it."""
        talk = _Talk(0, self._conversations[0])
        # A salt of its own: the first question must not find its answer looked up.
        params = replace(
            self._load.params,
            max_tokens=min(_WARM_UP_TOKENS, self._load.params.max_tokens),
            cache_salt="warm-up",
        )
        with suppress(RequestError):  # a question too long is counted as failed when it is asked
            self._llm.generate([self._prompt(talk, self._conversations[0].turns[0])], params)

    def hold(self, indices: Sequence[int], on_request: Callable[[], None]) -> None:
        """Hold these conversations, `batch_size` at a time."""
        loop, run = self._llm.loop, self._run
        waiting = deque(_Talk(index, self._conversations[index]) for index in indices)
        talking: dict[str, tuple[_Talk, Admitted]] = {}
        inbox: deque[Delta] = deque()

        def ask(talk: _Talk) -> None:
            if (asked := self._question(talk, on_request)) is not None:
                talking[asked.request.request_id] = talk, asked
                loop.submit([asked], inbox.append)

        if self._gpu:
            torch.cuda.reset_peak_memory_stats(self._llm.models.target.device)
        # The other engine has its turns between: weights that are streamed are one stream, for both.
        before = self._llm.statistics()
        began = time.perf_counter()
        tokens = 0
        try:
            while waiting or talking:
                while waiting and len(talking) < self._load.batch_size:
                    ask(waiting.popleft())
                if talking:
                    loop.wait_until(lambda: inbox)  # a step, or several that read prompts
                while inbox:
                    delta = inbox.popleft()
                    if delta.finished:
                        talk, asked = talking.pop(delta.id)
                        output = asked.transcript.output()
                        run.outputs[talk.key] = output
                        tokens += len(output.token_ids)
                        on_request()
                        talk.messages.append({"role": "assistant", "content": output.text})
                        talk.turn += 1
                        if talk.turn < len(talk.conversation.turns):
                            ask(talk)
                run.peak_memory = max(run.peak_memory, self._memory())
        finally:
            loop.cancel([asked for _, asked in talking.values()])
        seconds = time.perf_counter() - began
        run.seconds += seconds
        run.done = self._llm.statistics().since(before).after(run.done)
        run.group_rates.append(tokens / seconds)

    def finish(self) -> EngineRun:
        """The run as a whole."""
        run = self._run
        if not run.outputs:
            raise RequestError(f"no request could be served; the first: {next(iter(run.failures.values()))}")
        return run

    def _question(self, talk: _Talk, on_request: Callable[[], None]) -> Admitted | None:
        """The conversation's next request; None when it cannot be served, and the conversation is over."""
        try:
            prompt = self._prompt(talk, talk.conversation.turns[talk.turn])
            seed = (self._load.params.seed or 0) + self._request_number[talk.index] + talk.turn
            [[request]] = self._llm.intake.prompts([prompt], replace(self._load.params, seed=seed, n=1))
        except RequestError as error:
            for turn in range(talk.turn, len(talk.conversation.turns)):
                self._run.failures[talk.index, turn] = str(error)
                on_request()
            return None
        return request

    def _prompt(self, talk: _Talk, question: str) -> list[int]:
        """The conversation up to and with the question; without a template, its texts by empty lines."""
        talk.messages.append({"role": "user", "content": question})
        tokenizer = self._llm.tokenizer
        if self._load.chat:
            return tokenizer.encode_chat(talk.messages)
        return tokenizer.encode("\n\n".join(message["content"] for message in talk.messages))

    def _memory(self) -> int:
        if self._gpu:
            return torch.cuda.max_memory_allocated(self._llm.models.target.device)
        return int(self._process.memory_info().rss)
