"""Collecting: the target answers prompts, and what it thought on the way is kept.

One pass does it all. The engine answers in batches, without speculation; a listener keeps the hidden states
of the layers a head reads, and those behind the last layer. When a prompt is answered, the output layer makes
labels of the latter: that second use of it is all that labels cost. Every half a minute what was answered
becomes a shard.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from specinfer.config import EngineConfig
from specinfer.engine.admission import Admitted
from specinfer.errors import TuneError
from specinfer.llm import LLM
from specinfer.models.language_model import LayeredModel, Residual
from specinfer.plan import StepPlan
from specinfer.progress import Progress
from specinfer.request import Delta, FinishReason
from specinfer.runtime.features import TextFeatures
from specinfer.runtime.flight import HostFlight
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.speculator import Speculator
from specinfer.speculation_config import NO_SPECULATION
from specinfer.tokenizer import ChatEncoder
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import single_node
from specinfer.tune.dataset import LABELS, Corpus, TunedText
from specinfer.tune.prompts import Asked, shuffled


class HiddenStateListener(Speculator):
    """Keeps the hidden states of each text, from its first token on, until they are taken."""

    name = "listener"

    def __init__(self, taps: tuple[int, ...]) -> None:
        """`taps` are the layers whose inputs are kept."""
        self.taps = taps
        self._heard: dict[str, list[Tensor]] = {}  # by request: parts [T, N, D] of its text
        self._ends: dict[str, int] = {}  # where these end

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Trees without guesses."""
        return [single_node(entry.token_ids[entry.end - 1]) for entry in plan.tree_entries]

    def hear(self, texts: Sequence[TextFeatures]) -> None:
        """Keep these states; where a text begins anew, its old ones are dropped."""
        for features in texts:
            name = features.entry.request.request_id
            if features.start == 0:
                self._heard[name] = []
            elif self._ends.get(name) != features.start:
                continue  # its beginning was not heard: there is nothing to be had of it
            self._heard[name].append(features.states.copied())
            self._ends[name] = features.end

    def take(self, request_id: str) -> Tensor | None:
        """What was heard of a text, [T, N, D], which is forgotten with this; None: nothing."""
        parts = self._heard.pop(request_id, None)
        self._ends.pop(request_id, None)
        return torch.cat(parts) if parts else None


_SHARD_SECONDS: Final = 30.0  # that the answers of a shard take
_LEAST_ANSWER: Final = 8  # tokens that are worth the while
_MOST_SILENT: Final = 64  # prompts without an answer, before which there was none: the target says nothing
_ROWS: Final = 256  # of labels made at once
_BATCH: Final = 64  # requests in a step


def collecting(config: EngineConfig) -> EngineConfig:
    """The config of an engine that collects: many requests, no guesses, all of every prompt is read."""
    return replace(
        config,
        speculation=NO_SPECULATION,
        cache=replace(config.cache, prefix_reuse=False),
        scheduler=replace(
            config.scheduler,
            max_batch_size=max(_BATCH, config.scheduler.max_batch_size),
            max_step_tokens=max(512, config.scheduler.most_step_tokens),
        ),
    )


@dataclass(slots=True)
class Collected:
    """What came of collecting."""

    answered: int = 0  # prompts, with an answer to learn from
    silent: int = 0  # prompts that the target answered with too little
    refused: int = 0  # prompts that cannot be asked: longer than a text may be
    refusal: str = ""  # why the last of them could not

    def told(self, corpus: Corpus) -> str:
        """The same in a line for a person, with what there is now."""
        skipped = f", {self.silent} said nothing" if self.silent else ""
        skipped += f", {self.refused} were too long" if self.refused else ""
        return (
            f"{self.answered} prompts were answered{skipped}; there are {corpus.tokens} tokens of answers, "
            f"{corpus.count(held_out=True)} texts held out and {corpus.count(held_out=False)} not, "
            f"{corpus.tokens / max(corpus.seconds, 0.01):.0f} tokens/s"
        )


@dataclass(slots=True)
class _Flying:
    """A prompt that is being answered, and the answer so far."""

    one: Asked
    ids: Sequence[int]
    admitted: Admitted
    said: list[int] = field(default_factory=list)


class Collector:
    """Asks a target, as many prompts at once as fit into a step."""

    def __init__(
        self, llm: LLM, listener: HiddenStateListener, *, chat: bool, max_tokens: int, seed: int = 0
    ) -> None:
        """`llm` has a config of `collecting` and the listener, whose last tap lies behind all layers.

        `seed` says in which order prompts are asked, and what answers are drawn.
        """
        self._llm = llm
        self._listener = listener
        self._chat = chat
        self._encoder = ChatEncoder(llm.tokenizer)
        self._max_tokens = max_tokens
        self._seed = seed
        self._deltas: deque[Delta] = deque()
        self._flying: dict[str, _Flying] = {}

    def run(
        self,
        prompts: Sequence[Asked],
        corpus: Corpus,
        seconds: float,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> Collected:
        """Ask prompts until `seconds` are over or all are answered; add shards to `corpus`.

        The first time it goes on until there is something to learn from and to measure with. Answers that are
        not whole when the time is over are kept as far as they are. Raises TuneError where the target says
        nothing, OSError where a shard cannot be written.
        """
        known = corpus.keys
        waiting = deque(one for one in in_order(prompts, self._seed) if one.key not in known)
        found = Collected()
        texts: list[TunedText] = []
        began = written = clock()
        progress.start(len(waiting), "collecting answers", "prompts")
        try:
            while self._ask(waiting, found) and not self._is_silent(corpus, texts, found):
                self._llm.loop.wait_until(lambda: self._deltas)
                texts += self._land(found, progress)
                now = clock()
                if texts and now - written >= _SHARD_SECONDS:
                    corpus.add(texts, now - written)
                    texts, written = [], now
                if now - began >= seconds and (corpus.tokens or texts or self._said_enough()):
                    break
        finally:
            progress.finish()
            self._llm.loop.cancel([one.admitted for one in self._flying.values()])
        texts += self._land(found, progress)
        if texts:
            corpus.add(texts, clock() - written)
        if not corpus.tokens:
            raise TuneError(_nothing(found))
        return found

    def _ask(self, waiting: deque[Asked], found: Collected) -> bool:
        """Ask as many as there is room for; whether somebody is being answered."""
        longest = self._llm.intake.longest - 2
        while waiting and len(self._flying) < self._llm.config.scheduler.max_batch_size:
            one = waiting.popleft()
            ids = self._ids(one)
            if not 0 < len(ids) <= longest:
                found.refused += 1
                found.refusal = f"a prompt has {len(ids)} tokens, 1 to {longest} are possible"
                continue
            params = SamplingParams(
                temperature=one.temperature,
                seed=shuffled(one.key, self._seed),
                max_tokens=min(self._max_tokens, longest + 2 - len(ids)),
            )
            admitted = self._llm.intake.completion(ids, params)
            self._flying[admitted.request.request_id] = _Flying(one, ids, admitted)
            self._llm.loop.submit([admitted], self._deltas.append)
        return bool(self._flying)

    def _land(self, found: Collected, progress: Progress) -> list[TunedText]:
        """The texts that ended, as far as there is something to learn from."""
        texts: list[TunedText] = []
        while self._deltas:
            delta = self._deltas.popleft()
            if (flying := self._flying.get(delta.id)) is None:
                continue
            flying.said.extend(delta.token_ids)
            if not delta.finished:
                continue
            del self._flying[delta.id]
            progress.advance(1)
            text = self._text(flying, self._listener.take(delta.id))
            if text is not None:
                texts.append(text)
                found.answered += 1
            elif delta.finish_reason is not FinishReason.ABORT:
                found.silent += 1
        return texts

    def _text(self, flying: _Flying, heard: Tensor | None) -> TunedText | None:
        """A text as far as the target's states are known; None: less than two tokens of answer."""
        ids = flying.ids
        # Of the step that ends a text nothing is heard: its last token has no labels, and is left out.
        tokens = [*ids, *flying.said][: 0 if heard is None else len(heard) + 1]
        if heard is None or len(tokens) < len(ids) + 2:
            return None
        heard = heard[: len(tokens) - 1]
        target = self._llm.models.target
        assert isinstance(target, LayeredModel), "layers of others have no taps"
        labels = _labels(target, heard[len(ids) - 1 :, -1])
        taps = heard[:, :-1].cpu().contiguous()
        one = flying.one
        return TunedText(torch.tensor(tokens), len(ids), taps, *labels, one.key, one.held_out)

    def _said_enough(self) -> bool:
        """Whether two of the answers under way, of which one is held out, are worth keeping."""
        return sum(len(one.said) >= _LEAST_ANSWER for one in self._flying.values()) >= 2

    def _is_silent(self, corpus: Corpus, texts: Sequence[TunedText], found: Collected) -> bool:
        return not texts and not corpus.tokens and found.silent + found.refused >= _MOST_SILENT

    def _ids(self, one: Asked) -> Sequence[int]:
        tokenizer = self._llm.tokenizer
        if not isinstance(one.content, str):
            return one.content
        if self._chat:
            return self._encoder.token_ids([{"role": "user", "content": one.content}])
        return tokenizer.encode(one.content)


def in_order(prompts: Sequence[Asked], seed: int) -> list[Asked]:
    """The prompts in an order of the seed's, but for the first two.

    These are one that is held out and one that is not: enough for the shortest run.
    """
    ordered = sorted(prompts, key=lambda one: shuffled(one.key, seed))
    first = [next((one for one in ordered if one.held_out is held), None) for held in (True, False)]
    return [one for one in first if one is not None] + [one for one in ordered if one not in first]


@torch.inference_mode()
def _labels(target: LayeredModel, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens behind rows of the last layer's output, and their log-probabilities, [R, K]."""
    vocab = target.config.vocab_size
    count = min(LABELS, vocab)
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    for rows_RD in torch.split(hidden_RD, _ROWS):
        read_RD = target.final_norm(Residual(rows_RD.contiguous()))
        flight = HostFlight(read_RD, target.logits, vocab, target.kernels.scan)
        likeliest = flight.likeliest(range(len(rows_RD)), count, [1.0] * len(rows_RD))
        values = torch.from_numpy(likeliest.values - likeliest.values[:, :1]).double()
        masses = torch.from_numpy(likeliest.masses)[:, None]
        ids.append(torch.from_numpy(likeliest.ids).clamp(min=0))
        logprobs.append((values - masses.log()).float())
    return torch.cat(ids), torch.cat(logprobs)


def _nothing(found: Collected) -> str:
    if not found.silent and found.refused:
        return f"no prompt can be asked: {found.refusal}; give shorter prompts or a larger --max-context"
    return (
        f"the target said nothing to {found.silent} prompts: no answer was longer than a token. Is it "
        "a model that follows instructions, and its chat template right? --raw asks them as they stand"
    )
