"""Predictors of matching length: MLPs by size and inputs, beside the policy's estimates and a constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy as log_loss

from benchmarks.paper.lab import Lab
from benchmarks.paper.plots import INK, lines
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.study import ask, shown, table
from specinfer import RequestOutput, SamplingParams
from specinfer.engine.costs import measure_curves
from specinfer.engine.steps import TreeEvent
from specinfer.hub import resolve
from specinfer.models.open_model import open_model
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import Expansion
from specinfer.tune.collector import HiddenStateListener

ASKS: Final = "Which predictor of the matching length is worth it?"
_LEVELS: Final = 8  # guesses of the draft's chain, which every step verifies
_MODES: Final = {"greedy": 0.0, "sampled": 1.0}  # their temperatures
_BEFORE: Final = ("recent", "entropy", "features")  # inputs that are known before a draft runs
_INPUTS: Final[dict[str, tuple[str, ...]]] = {
    **{name: (name,) for name in _BEFORE},
    **{"these three": _BEFORE, "draft": ("draft",), "all four": (*_BEFORE, "draft")},
}
_UNITS: Final = (16, 64, 256)  # of an MLP's hidden layer
_SEEN: Final = ("policy", "draft", "all four")  # they know each guess's probability once it is drawn
_MLPS: Final = [f"{inputs}, {units}" for inputs in _INPUTS for units in _UNITS]
_FADE: Final = 0.8  # factor of the average of accepted guesses at each step
_PATIENCE: Final = 5  # epochs without a gain, which end a training
_GAIN: Final = 1e-3  # least gain of an epoch, in log-loss
_TOP: Final = 20  # likeliest tokens that make the entropy


class _Step(NamedTuple):
    """A step whose chain was whole, and what was known before it."""

    request: str
    tree: TokenTree
    committed: list[int]
    recent: tuple[int, int, float]  # tokens of the answer, accepted guesses of the step before and on average
    entropy: float  # the target's, at the last token
    features_D: Tensor  # output of the target's last layer, at the token before


def keys(lab: Lab) -> list[str]:
    return lab.pick(full=[*_MODES], quick=["greedy"], toy=["greedy"])


def measure(lab: Lab, key: str) -> Figures:
    count, limit = lab.pick(full=(20, 64), quick=(8, 64), toy=(3, 24))
    questions = [text for name in lab.datasets() for text in lab.questions(name, count)]
    common: dict[str, Any] = {"temperature": _MODES[key], "max_tokens": limit, "logprobs": _TOP}
    each = [SamplingParams(seed=seed, **common) for seed in range(len(questions))]
    listener = HiddenStateListener((open_model(resolve(lab.target)).config.num_layers,))
    events: list[TreeEvent] = []
    recorded: dict[str, Any] = {
        "expansion": Expansion((1,) * _LEVELS),
        "prefix_reuse": False,
        "speculators": [listener],
    }
    with lab.llm(lab.target, [lab.draft], **recorded) as llm:
        llm.on_tree = events.append
        steps = _steps(events, ask(llm, questions, each), listener)
        curves = measure_curves(llm.config, llm.models, 64)
    costs = curves.target.table(1 + _LEVELS), curves.drafts["draft"].expected(1)
    predictors = _compared(steps, costs, _MODES[key])
    return {"predictors": predictors, "costs": costs, "steps": len(steps), "texts": len(questions)}


def _steps(
    events: Sequence[TreeEvent], outputs: Sequence[RequestOutput], listener: HiddenStateListener
) -> list[_Step]:
    answers = {one.request_id: one for one in outputs}
    states = {name: listener.take(name) for name in answers}
    recent, steps = dict.fromkeys(answers, (0, 0, 0.0)), []
    for event in events:
        name, path = event.request_id, event.acceptance.path
        made, _, mean = recent[name]
        states_TND, output = states[name], answers[name]
        before = len(output.prompt_token_ids) + made - 2  # position of the token before the last
        if event.tree.num_nodes > _LEVELS and states_TND is not None and before < len(states_TND):
            committed = [event.tree.token_ids[node] for node in path] + [event.acceptance.next_token]
            known = [one.logprob for one in (output.logprobs or ())[made - 1].values() if one.rank <= _TOP]
            entropy = -sum(one * math.exp(one) for one in known)
            features_D = states_TND[before, 0].float()
            steps.append(_Step(name, event.tree, committed, recent[name], entropy, features_D))
        recent[name] = made + 1 + len(path), len(path), _FADE * mean + (1 - _FADE) * len(path)
    return steps


def _compared(steps: Sequence[_Step], costs: tuple[Sequence[float], float], temperature: float) -> Figures:
    """Return the figures of each predictor on the texts that are held back, one of three."""
    torch.manual_seed(0)
    texts = {name: number for number, name in enumerate(dict.fromkeys(step.request for step in steps))}
    text_S1 = torch.tensor([[texts[step.request]] for step in steps])
    held_S1, levels_L = text_S1 % 3 == 2, torch.arange(_LEVELS)
    lengths_S1 = torch.tensor([[len(step.committed) - 1] for step in steps])
    tried_SL, right_SL = lengths_S1 >= levels_L, (lengths_S1 > levels_L).float()
    learnt_SL = tried_SL & ~held_S1
    ahead_L = (right_SL * learnt_SL).sum(0) / learnt_SL.sum(0).clamp(min=1)
    found = {"constant": ahead_L.expand_as(right_SL), "policy": _by_policy(steps, temperature)}
    found["oracle"], parts = right_SL, _parts(steps)
    for name in _MLPS:
        inputs, _, units = name.partition(", ")
        x_SLW = torch.cat([parts[part] for part in ("level", *_INPUTS[inputs])], dim=2)
        found[name] = _trained(x_SLW, right_SL, learnt_SL, text_S1 % 6 == 0, int(units))
    figures, held_S = {}, held_S1[:, 0]
    for name, likely_SL in found.items():
        likely_HL, lengths_H = likely_SL[held_S], lengths_S1[held_S, 0]
        ahead = ahead_L.tolist() if name.partition(",")[0] in _SEEN else None
        figures[name] = {
            "error": float((likely_HL.cumprod(1).sum(1) - lengths_H).abs().mean()),
            "tokens_per_second": _speed(likely_HL.tolist(), lengths_H.tolist(), costs, ahead),
        }
    return figures


def _parts(steps: Sequence[_Step]) -> dict[str, Tensor]:
    """Return the inputs by part for every guess, [steps, levels, numbers]."""

    def for_all(numbers_SW: Tensor) -> Tensor:
        return numbers_SW[:, None].expand(-1, _LEVELS, -1)

    def down_to_each(tree: TokenTree) -> list[tuple[float, ...]]:
        logs = [math.log(max(draw.confidence, 1e-9)) for draw in tree.draws]
        return [*zip(logs, accumulate(logs), (draw.evidence[1] for draw in tree.draws), strict=True)]

    return {
        "level": torch.eye(_LEVELS).expand(len(steps), -1, -1),
        "recent": for_all(torch.tensor([step.recent for step in steps])),
        "entropy": for_all(torch.tensor([[step.entropy] for step in steps])),
        "features": for_all(torch.stack([step.features_D for step in steps])),
        "draft": torch.tensor([down_to_each(step.tree) for step in steps]),
    }


def _by_policy(steps: Sequence[_Step], temperature: float) -> Tensor:
    """Return the policy's probabilities of each step's guesses, which learn from all steps before."""
    rates, found = AcceptanceRates({"draft": _LEVELS}), []
    for step in steps:
        found.append(rates.node_rates(step.tree)[1:])
        rates.learn(step.tree, step.committed, temperature)
    return torch.tensor(found)


def _trained(x_SLW: Tensor, right_SL: Tensor, learnt_SL: Tensor, ends_S1: Tensor, units: int) -> Tensor:
    """Return an MLP's probabilities; training ends by the loss on the texts of `ends_S1`."""
    x_NW, y_N = x_SLW[learnt_SL & ~ends_S1], right_SL[learnt_SL & ~ends_S1]
    mean_W, scale_W = x_NW.mean(0), x_NW.std(0) + 1e-6
    x_NW, x_SLW = (x_NW - mean_W) / scale_W, (x_SLW - mean_W) / scale_W
    mlp = nn.Sequential(nn.Linear(x_NW.shape[1], units), nn.ReLU(), nn.Linear(units, 1), nn.Sigmoid())
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-3)
    best, waited, likely_SL = math.inf, 0, torch.full_like(right_SL, 0.5)
    while waited < _PATIENCE:
        for rows in torch.tensor_split(torch.randperm(len(x_NW)), 1 + len(x_NW) // 128):
            optimizer.zero_grad()
            torch.autograd.backward(log_loss(mlp(x_NW[rows])[:, 0], y_N[rows]))
            optimizer.step()
        with torch.no_grad():
            now_SL = mlp(x_SLW)[..., 0]
        loss = float(log_loss(now_SL[learnt_SL & ends_S1], right_SL[learnt_SL & ends_S1]))
        best, waited, likely_SL = (loss, 0, now_SL) if loss < best - _GAIN else (best, waited + 1, likely_SL)
    return likely_SL


def _speed(
    likely_SL: Sequence[Sequence[float]],
    lengths: Sequence[int],
    costs: tuple[Sequence[float], float],
    ahead: Sequence[float] | None,
) -> float:
    """Return tokens per second if each step draws and verifies as these probabilities say.

    They are known before the first pass of the draft. With `ahead`, the expected rates of levels, each is
    known once its guess is drawn.
    """
    tokens, seconds, (target, draft) = 0, 0.0, costs

    def speeds(rates: Sequence[float], drawn: int | None = None) -> list[float]:
        """Return tokens per second by the number of verified guesses, with as many drawn or `drawn`."""
        made = accumulate(accumulate(rates, mul), initial=1.0)
        return [one / (target[1 + n] + (n if drawn is None else drawn) * draft) for n, one in enumerate(made)]

    for likely_L, length in zip(likely_SL, lengths, strict=True):
        for drawn in range(_LEVELS + 1):
            by_depth = speeds(likely_L if ahead is None else [*likely_L[:drawn], *ahead[drawn:]])
            if by_depth[drawn] >= max(by_depth[drawn:]):
                break
        by_kept = speeds(likely_L[:drawn], drawn)
        kept = by_kept.index(max(by_kept))
        tokens += 1 + min(length, kept)
        seconds += target[1 + kept] + drawn * draft
    return tokens / seconds


def page(cells: Cells) -> list[str]:
    rows = [
        (mode, name, *shown([one["error"]]), *shown([_over(cell, name)], 3))
        for mode, cell in cells.items()
        for name, one in cell["predictors"].items()
    ]
    steps = [f"{cell['steps']} steps of {cell['texts']} texts {mode}" for mode, cell in cells.items()]
    return [
        "Every step verifies a chain of eight guesses of the draft. A predictor says how likely each is "
        "accepted; which guesses it would draw and verify follows from the times of passes. MLPs have one "
        "hidden layer of 16, 64 or 256 units, and learn from two of three texts; the policy learns from all "
        "steps before; the figures are of the third. Inputs: recent (tokens so far, guesses accepted in the "
        "last step and on average), the target's entropy and last features, all known before a "
        "draft runs, and the draft's probabilities. The best MLP is the best on these texts, "
        "which favours it.",
        *table(" | predictor | error of the length | tokens/s over the constant's", rows),
        f"Measured over {', '.join(steps)}. {_gains(cells)}.",
        "The true length bounds the gain of any predictor.",
    ]


def _gains(cells: Cells) -> str:
    """Return the speeds over the constant's, by mode."""
    each = []
    for mode, cell in cells.items():
        best = max(_MLPS, key=lambda name: _over(cell, name))
        policy, mlp, oracle = shown(_over(cell, name) for name in ("policy", best, "oracle"))
        each.append(
            f"{mode.capitalize()}, the policy makes {policy} times the constant's tokens/s, the best MLP "
            f"({best}) {mlp}, the true length {oracle}"
        )
    return ". ".join(each)


def _over(cell: Figures, name: str) -> float:
    """Return a predictor's tokens per second over the constant's."""
    found = cell["predictors"]
    return float(found[name]["tokens_per_second"] / found["constant"]["tokens_per_second"])


def plot(cells: Cells, figure: Figure) -> None:
    for mode, axes in zip(cells, figure.subplots(1, len(cells), sharey=True, squeeze=False)[0], strict=True):
        of = {inputs: {str(n): _over(cells[mode], f"{inputs}, {n}") for n in _UNITS} for inputs in _INPUTS}
        lines(axes, of)
        for name, style in (("constant", ":"), ("policy", "--"), ("oracle", "-.")):
            axes.axhline(_over(cells[mode], name), linestyle=style, color=INK, label=name)
        axes.set(xlabel=f"units, {mode}", ylabel="tokens/s over the constant's")
    axes.legend(ncols=2)


def verdict(cells: Cells) -> Verdict:
    return Verdict(_gains(cells))
