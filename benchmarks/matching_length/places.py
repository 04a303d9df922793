"""What is known at every place of recorded texts before anything is drawn, and what became of the guesses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer import LLM
from specinfer.models.language_model import LanguageModel
from specinfer.plan import StepPlan
from specinfer.replay.fixed_policies import LookingOn
from specinfer.replay.guess_trie import NO_SITE
from specinfer.replay.replay import Part, play
from specinfer.replay.trace import RecordedDraft, Trace
from specinfer.replay.trace_store import read_trace
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.policy.calibration import Calibration
from specinfer.speculate.policy.level_counts import LevelCounts
from specinfer.tree import Draw, TokenTree
from specinfer.tree.token_tree import draws_by_parent

LEVELS: Final = 8  # of a guess that are predicted
CHUNK: Final = 128  # rows of a pass over a text
FADES: Final = (4.0, 16.0)  # tokens, over which hits of a text are averaged
USUAL: Final = 0.7  # of guesses that are right, before any was seen
FLAT: Final = CostCurve((1, 2), (1.0, 1.0))  # where costs do not matter

Floats = NDArray[np.float32]
# A speculator's guesses at each place of some texts: 1 right, 0 wrong, NaN not known or not guessed.
Hits = Mapping[str, Floats]  # [places, LEVELS]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of all places of some texts, and what became of the guesses there."""

    count: int  # of texts
    texts: NDArray[np.int64]  # [places]: which text it is of
    cheap: Floats  # [places, features]
    hidden: Floats  # [places, taps, D], of the row that chose the root; the final one last
    hits: Hits
    counted: Hits  # the policy's own idea of each hit, before it was known
    drawn: Hits  # the same of drafts behind their first pass: how sure they are of their first guesses

    def inputs(self, name: str) -> Floats:
        """What a predictor sees of each place, [places, features]."""
        parts = {
            "cheap": self.cheap,
            "final": self.hidden[:, -1],
            "taps": self.hidden[:, :-1].reshape(len(self.hidden), -1),
        }
        return np.concatenate([parts[part] for part in name.split(" + ")], axis=1)


def hear(model: str, quantization: str, paths: Sequence[Path]) -> None:
    """Write the hidden states of a target along the texts of traces, of those whose file is not there yet."""
    missing = [path for path in paths if not hidden_file(path).exists()]
    if not missing:
        return
    with LLM(model, quantization=quantization, max_batch_size=1) as llm:
        for path in missing:
            states = hidden_states(llm.models.target, read_trace(path), llm.config.cache.block_size)
            with hidden_file(path).open("wb") as file:
                np.savez(file, hidden=states)


def hidden_file(path: Path) -> Path:
    return path.with_suffix(".hidden")


def hidden(path: Path) -> Floats:
    """The hidden states beside a trace, [places, taps, D], each divided by its root mean square."""
    with np.load(hidden_file(path)) as file:
        states = np.asarray(file["hidden"], dtype=np.float32)
    mean: Floats = np.square(states).mean(axis=-1, keepdims=True)
    scaled: Floats = states / np.sqrt(mean + 1e-6)
    return scaled


def hidden_states(target: LanguageModel, trace: Trace, block_size: int) -> NDArray[np.float16]:
    """Of every place the inputs of a middle layer, of a late one, and what the last one gave.

    They are of the row that chose the root; zeros at a text's first place, where none has before the guesses.
    """
    layers = target.config.num_layers
    taps = (layers // 2, max(0, layers - 4), layers)
    found: list[NDArray[np.float16]] = []
    for text in trace.texts:
        ids = [*text.prompt, *text.output][:-2]
        blocks = -(-len(ids) // block_size) + 1
        runner = ModelRunner(target, num_blocks=blocks, block_size=block_size)
        rows: list[torch.Tensor] = []
        for start in range(0, len(ids), CHUNK):
            part = chain_rows(ids[start : start + CHUNK], start, range(blocks), logits=False)
            flight = runner.launch([part], taps=taps)
            rows.append(torch.stack([flight.hidden(tap) for tap in taps], dim=1))
        states = np.zeros((len(text.output), len(taps), target.config.hidden_size), dtype=np.float16)
        states[1:] = torch.cat(rows)[len(text.prompt) - 1 :].float().numpy()
        found.append(states)
    return np.concatenate(found)


def known(trace: Trace, states: Floats, without: Collection[tuple[int, ...]] = ()) -> Known:
    """All that is known of a trace's places but those of prompts `without`, and of texts' first ones."""
    lookups, sure, counted = listened(trace)
    hits = {name: draft_hits(trace, draft) for name, draft in trace.drafts.items()}
    depth = trace.speculation.fixed_expansion.depth
    counted |= {name: level_rates(of, depth) for name, of in hits.items()}
    drawn = {name: first_guesses(trace, name, draft) for name, draft in trace.drafts.items()}
    hits |= lookups
    starts = trace.starts
    place = np.concatenate([np.arange(len(text.output)) for text in trace.texts])
    texts = np.repeat(np.arange(len(trace.texts)), np.diff(starts))
    cheap = cheap_features(trace, hits, sure, counted, place, texts)
    kept = place > 0
    kept &= np.array([text.prompt not in without for text in trace.texts])[texts]

    def those(of: Hits) -> Hits:
        return {name: values[kept] for name, values in of.items()}

    return Known(
        len(trace.texts), texts[kept], cheap[kept], states[kept], those(hits), those(counted), those(drawn)
    )


def joined(parts: Sequence[Known]) -> Known:
    """Places of several traces as those of one; texts are numbered on."""
    texts, count = list[NDArray[np.int64]](), 0
    for part in parts:
        texts.append(part.texts + count)
        count += part.count

    def all_of(of: Sequence[Hits]) -> Hits:
        return {name: np.concatenate([one[name] for one in of]) for name in of[0]}

    return Known(
        count,
        np.concatenate(texts),
        np.concatenate([part.cheap for part in parts]),
        np.concatenate([part.hidden for part in parts]),
        all_of([part.hits for part in parts]),
        all_of([part.counted for part in parts]),
        all_of([part.drawn for part in parts]),
    )


def draft_hits(trace: Trace, draft: RecordedDraft) -> Floats:
    """How far each level of the expansion follows the text from each place, [places, LEVELS].

    The children of a path that became text are those of the place behind it, so roots alone tell it, too.
    """
    guesses = draft.guesses
    found = np.full((trace.places, LEVELS), np.nan, dtype=np.float32)
    for text, start in zip(trace.texts, trace.starts, strict=False):
        for place in range(len(text.output)):
            site = int(guesses.roots[start + place])
            for level, width in enumerate(trace.speculation.fixed_expansion.widths[:LEVELS]):
                if place + level >= len(text.output):
                    break
                if site == NO_SITE or guesses.asked[site] < width:
                    site = int(guesses.roots[start + place + level])
                    if site == NO_SITE or guesses.asked[site] < width:
                        break
                tokens, _, below = guesses.draws(site)
                token = text.output[place + level]
                hit = token in tokens[:width]
                found[start + place, level] = hit
                if not hit:
                    break
                site = below[tokens.index(token)]
    return found


def level_rates(hits: Floats, depth: int) -> Floats:
    """What a policy's counts say of each hit before it is known, all hits being seen in turn."""
    counts = LevelCounts(depth)
    rates = np.full_like(hits, np.nan)
    for place, of_place in enumerate(hits):
        rates[place, :depth] = [rate.any for rate in counts.rates()]
        for level, hit in enumerate(of_place[:depth]):
            if not np.isnan(hit):
                counts.learn(level, 0 if hit else None)
    return rates


def first_guesses(trace: Trace, name: str, draft: RecordedDraft) -> Floats:
    """What a draft's first guesses are worth by their confidence, once they are drawn, [places, LEVELS]."""
    calibration, guesses = Calibration(), draft.guesses
    width = trace.speculation.fixed_expansion.widths[0]
    found = np.full((trace.places, LEVELS), np.nan, dtype=np.float32)
    output = [token for text in trace.texts for token in text.output]
    for place, site in enumerate(guesses.roots.tolist()):
        if site == NO_SITE:
            continue
        tokens, sure, _ = guesses.draws(site)
        rule = trace.speculation.draw_rule
        draws = [Draw(0, i + 1, name, rule, None, sure[i]) for i in range(min(width, len(tokens)))]
        found[place, 0] = min(1.0, sum(calibration.rates(draws)))
        here = [i + 1 for i, token in enumerate(tokens[:width]) if token == output[place]]
        calibration.learn(draws, here[0] if here else None)
    return found


class Listening(LookingOn):
    """Notes at every place how far each speculator's own guesses follow the text, and what was hoped."""

    def __init__(self, trace: Trace, names: Sequence[str]) -> None:
        self._texts = [text.prompt + text.output for text in trace.texts]
        starts = zip(trace.texts, trace.starts, strict=False)
        self._first = [start - len(text.prompt) for text, start in starts]
        self._calibration = Calibration()
        self._plan = StepPlan(())
        self.places = 0  # so far
        shape = (trace.places, LEVELS)
        self.hits = {name: np.full(shape, np.nan, dtype=np.float32) for name in names}
        self.counted = {name: np.full(shape, np.nan, dtype=np.float32) for name in names}
        self.sure = {
            name: np.zeros(trace.places, dtype=np.float32) for name in names
        }  # log-odds; 0: no guess

    def begin_step(self, plan: StepPlan) -> StepPlan:
        self._plan = plan
        return plan

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        for entry, tree in zip(self._plan.tree_entries, trees, strict=True):
            number = int(entry.request.request_id)
            place = self._first[number] + entry.end
            self.places += 1
            for level, (name, hit, rate, sure) in followed(
                tree, self._texts[number][entry.end : entry.end + LEVELS], self._calibration
            ):
                if name not in self.hits:  # predictions and grammars: they know without a predictor
                    continue
                self.hits[name][place, level] = hit
                self.counted[name][place, level] = rate
                if level == 0:
                    self.sure[name][place] = np.log(max(sure, 1e-6) / max(1 - sure, 1e-6))
        return super().choose_nodes(trees)


def followed(
    tree: TokenTree, text: Sequence[int], calibration: Calibration
) -> list[tuple[int, tuple[str, bool, float, float]]]:
    """By level what each speculator that was right so far says of a text: whether it holds the next token,
    how likely that was by the calibration, which learns of it then, and how sure it was.
    """
    below = draws_by_parent(tree.draws)
    found: list[tuple[int, tuple[str, bool, float, float]]] = []
    node, right = 0, frozenset(draw.speculator for draw in below.get(0, ()))
    for level, token in enumerate(text):
        draws = [draw for draw in below.get(node, ()) if draw.speculator in right]
        if not draws:
            break
        rates = calibration.rates(draws)
        child = next((draw.node for draw in draws if tree.token_ids[draw.node] == token), None)
        for name in sorted({draw.speculator for draw in draws}):
            own = [i for i, draw in enumerate(draws) if draw.speculator == name]
            hit = any(draws[i].node == child for i in own)
            hoped = min(1.0, sum(rates[i] for i in own))
            found.append((level, (name, hit, hoped, draws[own[0]].confidence)))
        calibration.learn(draws, child)
        if child is None:
            break
        right = frozenset(draw.speculator for draw in draws if draw.node == child)
        node = child
    return found


def listened(trace: Trace) -> tuple[dict[str, Floats], dict[str, Floats], dict[str, Floats]]:
    """Hits, sureness and hopes of the speculators that need no model, at every place."""
    names = [name for name in ("suffix", "ngram") if getattr(trace.speculation, name)]
    alone = replace(trace, drafts={}, speculation=replace(trace.speculation, drafts=()))
    listening = Listening(alone, names)
    if names:
        play([Part([(alone, i) for i in range(len(alone.texts))])], listening, speculation=alone.speculation)
        if listening.places != trace.places:  # the ensemble goes on without a policy that fails
            raise AssertionError(f"listened at {listening.places} of {trace.places} places, then it failed")
    return listening.hits, listening.sure, listening.counted


def cheap_features(
    trace: Trace,
    hits: Hits,
    sure: Hits,
    counted: Hits,
    place: NDArray[np.int64],
    texts: NDArray[np.int64],
) -> Floats:
    """What is known of each place without another look at the target: [places, features].

    Of the last tokens who would have guessed them is taken as known, asked or not: more than a policy has.
    """
    best = np.clip(np.nan_to_num(trace.likeliest.astype(np.float64), nan=-1.0, neginf=-30.0), -30, 0)
    first, second = np.exp(best).T
    rest = np.clip(1 - first - second, 1e-9, 1)
    entropy = -sum(p * np.log(np.clip(p, 1e-9, 1)) for p in (first, second, rest))
    margin = np.clip(best[:, 0] - best[:, 1], 0, 15)
    columns: list[NDArray[Any]] = [_before(margin, place), _before(entropy, place), _before(first, place)]
    columns += [_faded(entropy, place, 8.0, 1.0)]
    for of in hits.values():
        right = of[:, 0].astype(np.float64)
        columns += [_before(np.nan_to_num(right, nan=0.5), place), np.log1p(_run(right, place))]
        columns += [_faded(right, place, fade, USUAL) for fade in FADES]
    for of in sure.values():
        columns += [of, (of != 0).astype(np.float64)]
    for of in counted.values():  # so nobody knows less than the policy does
        rate = np.clip(np.nan_to_num(of[:, 0], nan=0.5), 0.01, 0.99)
        columns += [np.log(rate / (1 - rate))]
    lengths = np.array([len(text.prompt) for text in trace.texts])[texts]
    columns += [np.log1p(place), np.log(lengths)]
    return np.stack(columns, axis=1).astype(np.float32)


def _before(values: NDArray[Any], place: NDArray[np.int64]) -> NDArray[np.float64]:
    """What stood one place before in the same text; 0 at its first one."""
    return np.where(place > 0, np.roll(values, 1), 0.0)


def _faded(
    values: NDArray[Any], place: NDArray[np.int64], tokens: float, prior: float
) -> NDArray[np.float64]:
    """The mean over the last `tokens` or so of the same text, of which unknown ones show nothing."""
    found, mean = np.empty(len(values)), prior
    for i, value in enumerate(values):
        mean = prior if place[i] == 0 else mean
        found[i] = mean
        if not np.isnan(value):
            mean += (value - mean) / tokens
    return found


def _run(right: NDArray[np.float64], place: NDArray[np.int64]) -> NDArray[np.float64]:
    """How many tokens up to a place were guessed in a row."""
    found, length = np.empty(len(right)), 0
    for i, value in enumerate(right):
        length = 0 if place[i] == 0 else length
        found[i] = length
        length = length + 1 if value == 1 else 0
    return found
