"""Runs the same conversations without and with speculation, side by side.

Both engines share one process and the same loaded weights. A machine's speed drifts with other users, clock
and temperature, so the engines take turns: a group of conversations runs on one engine, then on the other.
The first engine alternates from group to group. A group is one conversation at batch size 1, and four times
the batch size above; at its end both engines run fewer requests than the batch size.

The load is closed: `batch_size` users each have one request in flight and send the next after the answer. So
time to first token contains no time in a queue. Both engines warm up before anything is counted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from queue import SimpleQueue

import psutil
import torch

from specinfer.engine.admission import AdmittedRequest
from specinfer.engine.steps import Statistics
from specinfer.errors import RequestError
from specinfer.llm import LLM
from specinfer.report.dataset import Conversation, Dataset
from specinfer.request import Delta, RequestOutput, SpeculationFigures
from specinfer.sampling_params import SamplingParams
from specinfer.tokenizer import ChatEncoder

Key = tuple[int, int]  # conversation, turn
_WARM_UP_TOKENS = 16
_GROUP = 4  # batch sizes per group


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Options of a run."""

    params: SamplingParams  # the first request has its seed, each next one the seed plus one
    batch_size: int = 1  # requests in flight
    chat: bool = True  # use the chat template


@dataclass(slots=True)
class EngineRun:
    """Results of one engine."""

    outputs: dict[Key, RequestOutput] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    seconds: float = 0.0  # seconds with requests in flight, summed over groups
    done: Statistics = field(default_factory=Statistics)  # the engine's statistics of that time
    peak_memory: int = 0  # bytes: GPU allocator, or the whole process on a CPU
    group_rates: list[float] = field(default_factory=list)  # output tokens per second, per group

    @property
    def total_output(self) -> int:
        """Output tokens of all answers."""
        return sum(len(o.token_ids) for o in self.outputs.values())

    @property
    def output_throughput(self) -> float:
        """Output tokens per second, prefill included."""
        return self.total_output / self.seconds

    @property
    def figures(self) -> SpeculationFigures:
        """Summed speculation figures of all requests."""
        total = SpeculationFigures()
        for output in self.outputs.values():
            total.add(output.figures)
        return total


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests without and with speculation."""

    baseline: EngineRun
    speculative: EngineRun
    busy_elsewhere: float  # mean number of cores that other programs used

    @property
    def speedup(self) -> float:
        """Output throughput with speculation divided by that without."""
        return self.speculative.output_throughput / self.baseline.output_throughput

    @property
    def group_speedups(self) -> list[float]:
        """Speedup of each group that both runs answered, to show how steady the figure is."""
        pairs = zip(self.baseline.group_rates, self.speculative.group_rates, strict=True)
        return [speculative / baseline for baseline, speculative in pairs if baseline and speculative]

    @property
    def pairs(self) -> Mapping[Key, tuple[RequestOutput, RequestOutput]]:
        """Both answers to each request that has two."""
        baseline, speculative = self.baseline.outputs, self.speculative.outputs
        return {key: (baseline[key], speculative[key]) for key in baseline if key in speculative}

    @property
    def identical(self) -> int:
        """Number of requests with the same text in both runs."""
        return sum(baseline.text == speculative.text for baseline, speculative in self.pairs.values())


def compare(
    baseline: LLM,
    speculative: LLM,
    dataset: Dataset,
    load: Load,
    *,
    on_request: Callable[[], None] = lambda: None,
    seconds: float = inf,
) -> Comparison:
    """Run every conversation on both engines; `on_request` is called after each request.

    No group of conversations begins after `seconds`.

    Raises RequestError if an engine could serve no request.
    """
    sides = [_Bench(llm, load, dataset) for llm in (baseline, speculative)]
    for side in sides:
        side.warm_up()
    began, busy = time.perf_counter(), _busy_elsewhere()
    for number, group in enumerate(_groups(dataset, load.batch_size)):
        if time.perf_counter() - began > seconds:
            break
        for side in sides if number % 2 == 0 else reversed(sides):
            side.hold(group, on_request)
    lasted = time.perf_counter() - began
    elsewhere = max((_busy_elsewhere() - busy) / lasted, 0.0)
    return Comparison(sides[0].finish(), sides[1].finish(), elsewhere)


def _busy_elsewhere() -> float:
    """Return CPU seconds since boot that other processes used, including other guests of the machine."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    counted = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
    return float(counted - idle - own.user - own.system)


def _groups(dataset: Dataset, batch_size: int) -> Iterator[Sequence[int]]:
    size = 1 if batch_size == 1 else _GROUP * batch_size
    indices = range(len(dataset.conversations))
    return (indices[start : start + size] for start in range(0, len(indices), size))


@dataclass(slots=True)
class _Talk:
    """A conversation in progress."""

    index: int
    conversation: Conversation
    turn: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.index, self.turn


class _Bench:
    """One engine with its conversations."""

    def __init__(self, llm: LLM, load: Load, dataset: Dataset) -> None:
        self._llm = llm
        self._load = load
        self._chat = ChatEncoder(llm.tokenizer)
        self._conversations = dataset.conversations
        turns = (len(conversation.turns) for conversation in self._conversations)
        self._request_number = [*accumulate(turns, initial=0)]  # number of a conversation's first request
        self._run = EngineRun()
        self._process = psutil.Process()
        self._gpu = llm.models.target.device.type == "cuda"

    def warm_up(self) -> None:
        """Answer a short form of the first question once and discard the answer."""
        self._llm.loop.rest()
        talk = _Talk(0, self._conversations[0])
        # Its own cache salt keeps lookups from finding this answer.
        params = replace(
            self._load.params,
            max_tokens=min(_WARM_UP_TOKENS, self._load.params.max_tokens),
            cache_salt="warm-up",
        )
        with suppress(RequestError):  # a prompt that is too long counts as a failure later
            self._llm.generate([self._prompt(talk, self._conversations[0].turns[0])], params)

    def hold(self, indices: Sequence[int], on_request: Callable[[], None]) -> None:
        """Run these conversations, `batch_size` at a time."""
        loop, run = self._llm.loop, self._run
        waiting = deque(_Talk(index, self._conversations[index]) for index in indices)
        talking: dict[str, tuple[_Talk, AdmittedRequest]] = {}
        inbox: SimpleQueue[Delta] = SimpleQueue()

        def start(talk: _Talk) -> None:
            if (admitted := self._question(talk, on_request)) is not None:
                talking[admitted.request.request_id] = talk, admitted
                loop.submit([admitted], inbox.put)

        if self._gpu:
            torch.cuda.reset_peak_memory_stats(self._llm.models.target.device)
        # The other engine runs in between; streamed weights are one stream for both.
        before = self._llm.statistics()
        began = time.perf_counter()
        tokens = 0
        try:
            while waiting or talking:
                while waiting and len(talking) < self._load.batch_size:
                    start(waiting.popleft())
                if talking:
                    delta = inbox.get()
                    if delta.finished:
                        talk, admitted = talking.pop(delta.id)
                        output = admitted.transcript.output()
                        run.outputs[talk.key] = output
                        tokens += len(output.token_ids)
                        on_request()
                        talk.messages.append({"role": "assistant", "content": output.text})
                        talk.turn += 1
                        if talk.turn < len(talk.conversation.turns):
                            start(talk)
                run.peak_memory = max(run.peak_memory, self._memory())
        finally:
            loop.cancel([admitted for _, admitted in talking.values()])
        seconds = time.perf_counter() - began
        run.seconds += seconds
        run.done = self._llm.statistics().since(before).after(run.done)
        run.group_rates.append(tokens / seconds)

    def finish(self) -> EngineRun:
        """Return the results of the whole run."""
        run = self._run
        if not run.outputs:
            raise RequestError(f"no request could be served; the first: {next(iter(run.failures.values()))}")
        return run

    def _question(self, talk: _Talk, on_request: Callable[[], None]) -> AdmittedRequest | None:
        """Return the conversation's next request, or None if it cannot be served and the conversation
        ends.
        """
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
        """Return the conversation including the question; without a template, blank lines join its texts."""
        talk.messages.append({"role": "user", "content": question})
        tokenizer = self._llm.tokenizer
        if self._load.chat:
            return self._chat.token_ids(talk.messages)
        return tokenizer.encode("\n\n".join(message["content"] for message in talk.messages))

    def _memory(self) -> int:
        if self._gpu:
            return torch.cuda.max_memory_allocated(self._llm.models.target.device)
        return int(self._process.memory_info().rss)
