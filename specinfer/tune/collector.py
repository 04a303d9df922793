"""Collector: records a target's answers, their hidden states and the target's likeliest tokens.

One pass over each token suffices. The engine answers prompts in batches, without speculation, and a listener
keeps the hidden states of the tapped layers and of the last layer. When an answer is finished, the output
layer computes labels from the last layer's states; this second use of the output layer is the only extra
cost. Finished answers are written to a shard about every 30 seconds.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Final

import torch
from torch import Tensor

from specinfer.config import EngineConfig
from specinfer.engine.admission import AdmittedRequest
from specinfer.errors import TuneError
from specinfer.llm import LLM
from specinfer.models.decoder import Decoder
from specinfer.models.language_model import Residual
from specinfer.plan import StepPlan
from specinfer.progress import Progress
from specinfer.request import Delta, FinishReason
from specinfer.runtime.features import TextFeatures
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.speculator import Speculator
from specinfer.speculation_config import NO_SPECULATION
from specinfer.tokenizer import ChatEncoder
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import single_node
from specinfer.tune.dataset import LABELS, Corpus, TunedText
from specinfer.tune.prompts import TuningPrompt, shuffle_key


class HiddenStateListener(Speculator):
    """Keeps the hidden states of each text, from its first token on, until they are taken."""

    name = "listener"

    def __init__(self, taps: tuple[int, ...]) -> None:
        """`taps` are the layers whose inputs are kept."""
        self.taps = taps
        self._states: dict[str, list[Tensor]] = {}  # by request id: parts [T, N, D] of its text
        self._ends: dict[str, int] = {}  # by request id: end of the last part

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Return trees without guesses."""
        return [single_node(entry.token_ids[entry.end - 1]) for entry in plan.tree_entries]

    def receive_states(self, texts: Sequence[TextFeatures]) -> None:
        """Keep these states; a text that starts again replaces its old states."""
        for features in texts:
            name = features.entry.request.request_id
            if features.start == 0:
                self._states[name] = []
            elif self._ends.get(name) != features.start:
                continue  # the states of its first tokens are missing, so the text is unusable
            self._states[name].append(features.states.copied())
            self._ends[name] = features.end

    def take(self, request_id: str) -> Tensor | None:
        """Remove and return the states of a text, [T, N, D]; None if there are none."""
        parts = self._states.pop(request_id, None)
        self._ends.pop(request_id, None)
        return torch.cat(parts) if parts else None


_SHARD_SECONDS: Final = 30.0  # time between shards
_MIN_ANSWER: Final = 8  # tokens of an answer worth keeping
_MAX_SILENT: Final = 64  # prompts without any answer after which collecting fails
_ROWS: Final = 256  # rows per call of the output layer
_BATCH: Final = 64  # requests in a step


def collecting_config(config: EngineConfig) -> EngineConfig:
    """Config of an engine that collects: many requests, no speculation, no reuse of cached prefixes."""
    return replace(
        config,
        speculation=NO_SPECULATION,
        cache=replace(config.cache, prefix_reuse=False, prompt_store=None),
        scheduler=replace(
            config.scheduler,
            max_batch_size=max(_BATCH, config.scheduler.max_batch_size),
            max_step_tokens=max(512, config.scheduler.row_limit),
        ),
    )


@dataclass(slots=True)
class CollectionCounts:
    """Counts of one collecting run."""

    answered: int = 0  # prompts with an answer that is kept
    silent: int = 0  # prompts whose answer was too short
    refused: int = 0  # prompts that are too long for the target
    refusal: str = ""  # why the last of them was refused

    def summary(self, corpus: Corpus) -> str:
        """Summarize the run and the corpus in one line."""
        skipped = f", {self.silent} had no usable answer" if self.silent else ""
        skipped += f", {self.refused} were too long" if self.refused else ""
        return (
            f"{self.answered} prompts were answered{skipped}; there are {corpus.tokens} tokens of answers, "
            f"{corpus.count(held_out=True)} texts held out and {corpus.count(held_out=False)} not, "
            f"{corpus.tokens / max(corpus.seconds, 0.01):.0f} tokens/s"
        )


@dataclass(slots=True)
class _InProgress:
    """A prompt in progress and its answer so far."""

    one: TuningPrompt
    ids: Sequence[int]
    admitted: AdmittedRequest
    tokens: list[int] = field(default_factory=list)


class Collector:
    """Sends prompts to a target, as many at once as a step holds."""

    def __init__(
        self, llm: LLM, listener: HiddenStateListener, *, chat: bool, max_tokens: int, seed: int = 0
    ) -> None:
        """`llm` has a `collecting_config`, and `listener` taps the last layer's output as its last tap.

        `seed` determines the order of the prompts and the sampled answers.
        """
        self._llm = llm
        self._listener = listener
        self._chat = chat
        self._encoder = ChatEncoder(llm.tokenizer)
        self._max_tokens = max_tokens
        self._seed = seed
        self._deltas: SimpleQueue[Delta] = SimpleQueue()
        self._in_progress: dict[str, _InProgress] = {}

    def run(
        self,
        prompts: Sequence[TuningPrompt],
        corpus: Corpus,
        seconds: float,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> CollectionCounts:
        """Answer prompts until `seconds` have passed or all are answered; add shards to `corpus`.

        With an empty corpus it continues until there is a text to learn from and one to measure with. Answers
        that are unfinished at the end are kept as far as they go. Raises TuneError if the target gives no
        usable answer, OSError if a shard cannot be written.
        """
        known = corpus.keys
        waiting = deque(one for one in in_order(prompts, self._seed) if one.key not in known)
        found = CollectionCounts()
        texts: list[TunedText] = []
        began = written = clock()
        progress.start(len(waiting), "collecting answers", "prompts")
        try:
            while self._submit(waiting, found) and not self._is_silent(corpus, texts, found):
                texts += self._take_finished(found, progress)
                now = clock()
                if texts and now - written >= _SHARD_SECONDS:
                    corpus.add(texts, now - written)
                    texts, written = [], now
                if now - began >= seconds and (corpus.tokens or texts or self._has_enough()):
                    break
        finally:
            progress.finish()
            self._llm.loop.cancel([one.admitted for one in self._in_progress.values()])
        while self._in_progress:
            texts += self._take_finished(found, progress)
        if texts:
            corpus.add(texts, clock() - written)
        if not corpus.tokens:
            raise TuneError(_no_answers(found))
        return found

    def _submit(self, waiting: deque[TuningPrompt], found: CollectionCounts) -> bool:
        """Submit as many prompts as there is room for; return True while any is in progress."""
        longest = self._llm.intake.max_length - 2
        while waiting and len(self._in_progress) < self._llm.config.scheduler.max_batch_size:
            one = waiting.popleft()
            ids = self._ids(one)
            if not 0 < len(ids) <= longest:
                found.refused += 1
                found.refusal = f"a prompt has {len(ids)} tokens, 1 to {longest} are possible"
                continue
            params = SamplingParams(
                temperature=one.temperature,
                seed=shuffle_key(one.key, self._seed),
                max_tokens=min(self._max_tokens, longest + 2 - len(ids)),
            )
            admitted = self._llm.intake.completion(ids, params)
            self._in_progress[admitted.request.request_id] = _InProgress(one, ids, admitted)
            self._llm.loop.submit([admitted], self._deltas.put)
        return bool(self._in_progress)

    def _take_finished(self, found: CollectionCounts, progress: Progress) -> list[TunedText]:
        """Wait for output; return the finished texts that are long enough to learn from."""
        texts: list[TunedText] = []
        arrived = [self._deltas.get()]
        while not self._deltas.empty():
            arrived.append(self._deltas.get())
        for delta in arrived:
            if (running := self._in_progress.get(delta.id)) is None:
                continue
            running.tokens.extend(delta.token_ids)
            if not delta.finished:
                continue
            del self._in_progress[delta.id]
            progress.advance(1)
            text = self._text(running, self._listener.take(delta.id))
            if text is not None:
                texts.append(text)
                found.answered += 1
            elif delta.finish_reason is not FinishReason.ABORT:
                found.silent += 1
        return texts

    def _text(self, running: _InProgress, states: Tensor | None) -> TunedText | None:
        """A text as far as hidden states were recorded; None if its answer has fewer than two tokens."""
        ids = running.ids
        # The last step of a text reports no hidden states, so its last token has no labels and is left out.
        tokens = [*ids, *running.tokens][: 0 if states is None else len(states) + 1]
        if states is None or len(tokens) < len(ids) + 2:
            return None
        states = states[: len(tokens) - 1]
        target = self._llm.models.target
        assert isinstance(target, Decoder), "only a Decoder has taps"
        labels = _labels(target, states[len(ids) - 1 :, -1])
        taps = states[:, :-1].cpu().contiguous()
        one = running.one
        return TunedText(torch.tensor(tokens), len(ids), taps, *labels, one.key, one.held_out)

    def _has_enough(self) -> bool:
        """True if two unfinished answers, one of them held out, are long enough to keep."""
        return sum(len(one.tokens) >= _MIN_ANSWER for one in self._in_progress.values()) >= 2

    def _is_silent(self, corpus: Corpus, texts: Sequence[TunedText], found: CollectionCounts) -> bool:
        return not texts and not corpus.tokens and found.silent + found.refused >= _MAX_SILENT

    def _ids(self, one: TuningPrompt) -> Sequence[int]:
        tokenizer = self._llm.tokenizer
        if not isinstance(one.content, str):
            return one.content
        if self._chat:
            return self._encoder.token_ids([{"role": "user", "content": one.content}])
        return tokenizer.encode(one.content)


def in_order(prompts: Sequence[TuningPrompt], seed: int) -> list[TuningPrompt]:
    """Order the prompts by `seed`, with one held-out and one training prompt first.

    So the shortest run has a text to measure with and one to learn from.
    """
    ordered = sorted(prompts, key=lambda one: shuffle_key(one.key, seed))
    first = [next((one for one in ordered if one.held_out is held), None) for held in (True, False)]
    return [one for one in first if one is not None] + [one for one in ordered if one not in first]


@torch.inference_mode()
def _labels(target: Decoder, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
    """The target's likeliest next tokens, and their log-probabilities, for rows of hidden states, [R, K]."""
    vocab = target.config.vocab_size
    count = min(LABELS, vocab)
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    for rows_RD in torch.split(hidden_RD, _ROWS):
        read_RD = target.final_norm(Residual(rows_RD.contiguous()))
        flight = Flight(read_RD, target.logits, vocab, target.kernels.scan)
        likeliest = flight.likeliest(range(len(rows_RD)), count, [1.0] * len(rows_RD))
        values = torch.from_numpy(likeliest.values - likeliest.values[:, :1]).double()
        masses = torch.from_numpy(likeliest.masses)[:, None]
        ids.append(torch.from_numpy(likeliest.ids).clamp(min=0))
        logprobs.append((values - masses.log()).float())
    return torch.cat(ids), torch.cat(logprobs)


def _no_answers(found: CollectionCounts) -> str:
    if not found.silent and found.refused:
        return f"no prompt fits the target: {found.refusal}; give shorter prompts or a larger --max-context"
    return (
        f"the target gave no usable answer to {found.silent} prompts: no answer was longer than one token. "
        "Is it an instruction-tuned model with the right chat template? --raw sends prompts without it"
    )
