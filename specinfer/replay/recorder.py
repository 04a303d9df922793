"""Records traces: the target writes texts once, then the drafts guess at every place of them.

The drafts run in a replay whose policy verifies nothing, so that every step adds one token: they read and
guess as they would in an engine that decodes these texts without luck. Where heads are among them the target
reads the texts along with them, as they read its hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.config import NO_SPECULATION, SpeculationConfig
from specinfer.engine.drafts import ids_read, what_is_timed
from specinfer.engine.models import Models
from specinfer.engine.steps import Statistics
from specinfer.errors import ConfigError, RequestError
from specinfer.heads.block_model import BlockModel
from specinfer.heads.runner import HeadModel, HeadRunner
from specinfer.llm import LLM
from specinfer.models.language_model import LanguageModel
from specinfer.progress import NoProgress, Progress
from specinfer.replay.baselines import LookingOn
from specinfer.replay.drafts import CostTable, RecordedPasses, RecordedTrees
from specinfer.replay.engine import ReplayEngine, num_blocks
from specinfer.replay.guess_trie import GuessRecorder
from specinfer.replay.trace import DEPTH, RecordedDraft, RecordedEngine, RecordedText, Trace
from specinfer.replay.trace_store import KEPT_PARAMS
from specinfer.report.provenance import provenance
from specinfer.request import Request, RequestOutput
from specinfer.runtime.cost_curve import CostCurve, Timed, cost_curve
from specinfer.runtime.executor import LocalExecutor, ModelRunner
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.best_first import MOST_NODES
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.draft_tokens import named_tokens
from specinfer.speculate.drafts.growth import LIKELY_NODES, Shape
from specinfer.speculate.drafts.head_drafts import BlockDraft
from specinfer.speculate.drafts.one_pass import OnePassTrees, grow_best_first, level_drawer
from specinfer.speculate.speculator import LevelSpeculator
from specinfer.tree.draw import DrawRule
from specinfer.tree.expansion import Expansion

WIDTH: Final = (
    8  # children that are recorded at the root, and below the deepest nodes, where they cost nothing
)
# Of parameters a trace does not keep those that change no text, and what it keeps in another way.
_ELSEWHERE: Final = (
    "seed",
    "prediction",
    "logprobs",
    "prompt_logprobs",
    "logprobs_mode",
    "visible_token_ids",
)


@dataclass(frozen=True, slots=True)
class WrittenTexts:
    """What a target wrote, and what that took."""

    texts: tuple[RecordedText, ...]
    likeliest: NDArray[np.float32]  # [places, 2]: its two highest log-probabilities; NaN: not known
    stages: Mapping[str, float]  # seconds of each stage of a step, on average


def shapes_of(speculation: SpeculationConfig) -> list[Shape]:
    """The shapes in which drafts guess below every root, unless others are asked for.

    The first is what the engine's drafts do, made as deep as DEPTH; the second, for policies that would
    rather go on elsewhere, all paths that are likely, or what is wide at the root.
    """
    expansion, rule = speculation.fixed_expansion, speculation.draw_rule
    deep = expansion.deepened(DEPTH).widths
    first = Shape(Expansion((*deep[:-1], max(WIDTH, deep[-1]))), rule)
    if not isinstance(speculation.expansion, Expansion):
        return [first, learned_shape(speculation)]
    return [first, Shape(Expansion((WIDTH, 2, *[1] * (DEPTH - 3), WIDTH)), rule)]


def learned_shape(speculation: SpeculationConfig) -> Shape:
    """The shape of all likely paths, from which any learned one can be taken."""
    usual, rule = speculation.fixed_expansion, speculation.draw_rule
    return Shape(usual, rule, learned=True, nodes=LIKELY_NODES, least=0.0)


def record(
    llm: LLM,
    requests: Sequence[Request],
    *,
    shapes: Sequence[Shape] = (),
    progress: Progress | None = None,
) -> Trace:
    """A trace of what the LLM's target answers, with the guesses of its drafts in these `shapes`.

    Raises ConfigError where drafts draw samples, RequestError for parameters that a trace does not keep.
    """
    check(llm, requests)
    return record_guesses(llm, write_texts(llm, requests, progress), shapes=shapes, progress=progress)


def check(llm: LLM, requests: Sequence[Request]) -> None:
    """Raise ConfigError or RequestError where a trace would not tell what an engine does."""
    speculation = llm.config.speculation
    exact = (DrawRule.POINT_MASS, DrawRule.COUPLED)
    if speculation.verifier != "coupled" or speculation.draw_rule not in exact:
        raise ConfigError(
            f"the verifier is {speculation.verifier!r} and drafts draw by {speculation.draw_rule}; traces "
            "are recorded under the coupled rule, where the text does not depend on what is guessed"
        )
    heads = [name for name, draft in traced(llm.models).items() if isinstance(draft, BlockModel)]
    if not requests:
        raise RequestError("there are no requests to record; give at least one prompt")
    for request in requests:
        for f in fields(SamplingParams):
            if not f.init or f.name in KEPT_PARAMS or f.name in _ELSEWHERE:
                continue
            usual = f.default_factory() if f.default_factory is not MISSING else f.default
            if (value := getattr(request.params, f.name)) != usual:
                raise RequestError(f"{f.name} is {value!r}, and traces do not keep it; leave it out", f.name)
        if heads:
            _check_best_first(request.params, heads[0])


def _check_best_first(params: SamplingParams, head: str) -> None:
    """Raise RequestError where a head's trees would be drawn level by level, which is not recorded."""
    unset = SamplingParams()
    names = ("min_tokens", *(() if params.greedy else ("top_k", "top_p", "min_p")))
    for name in names:
        if (value := getattr(params, name)) != getattr(unset, name):
            raise RequestError(
                f"{name} is {value!r}, where head {head} draws its trees level by level; traces keep those "
                "that grow best first: leave it out",
                name,
            )


def traced(models: Models) -> dict[str, LanguageModel | BlockModel]:
    """The drafts whose guesses a trace can keep; raises ConfigError where one is of another kind."""
    found: dict[str, LanguageModel | BlockModel] = {}
    for name, draft in models.drafts.items():
        what = ""
        if name in models.foreign:
            what = "has another vocabulary than the target"
        elif isinstance(draft, HeadModel) and not isinstance(draft, BlockModel):
            what = "is a head that guesses no block"
        elif (
            isinstance(draft, BlockModel) and not draft.head.causal and draft.head.block_size > MOST_NODES + 1
        ):
            # How many of its rows there are, which all see each other, depends on how large trees may be.
            what = f"has blocks of {draft.head.block_size} rows, more than trees have nodes"
        else:
            found[name] = draft
        if what:
            raise ConfigError(
                f"{name} {what}; traces are recorded of block heads, and of models of the target's "
                "vocabulary: leave it out"
            )
    return found


def write_texts(llm: LLM, requests: Sequence[Request], progress: Progress | None = None) -> WrittenTexts:
    """Let the target answer without speculation: the first request alone, which shows what a step's stages
    take, the others in batches.
    """
    show = progress or NoProgress()
    plain = llm.variant(replace(llm.config, speculation=NO_SPECULATION))
    before = plain.statistics()
    prompts = [request.prompt_token_ids for request in requests]
    params = [
        replace(request.params, seed=request.seed, n=1, prediction=None, logprobs=2) for request in requests
    ]

    def hear(output: RequestOutput) -> None:
        if output.error is not None:
            raise RequestError(output.error)
        if output.finished:
            show.advance(1)

    show.start(len(requests), "writing texts", "texts")
    try:
        outputs = plain.generate(prompts[:1], params[:1], on_output=hear)
        done = plain.statistics().since(before)
        if prompts[1:]:
            outputs += plain.generate(prompts[1:], params[1:], on_output=hear)
    finally:
        show.finish()
        plain.close()
    return WrittenTexts(
        tuple(_text(*pair) for pair in zip(requests, outputs, strict=True)),
        np.array([row for output in outputs for row in _two_likeliest(output)], dtype=np.float32),
        _stages(done),
    )


def record_guesses(
    llm: LLM, written: WrittenTexts, *, shapes: Sequence[Shape] = (), progress: Progress | None = None
) -> Trace:
    """A trace of given texts, with the guesses of the LLM's drafts at every place of them.

    A draft guesses in all `shapes` below every root; what is kept is the union of its trees.
    """
    config, models, target = llm.config, llm.models, llm.models.target
    shapes = shapes or shapes_of(config.speculation)
    weights = config.speculation.draft_quantization
    own = traced(models)
    drafts = {
        name: _Recording(
            _curve(llm, model, f"{weights}, {what_is_timed(model, models.named.get(name))}", progress),
            GuessRecorder(),
            {},
        )
        for name, model in own.items()
    }
    trace = Trace(
        model=Path(config.model).name,
        engine=facts_of(llm),
        speculation=replace(
            config.speculation, drafts=tuple(Path(name).name for name in config.speculation.drafts)
        ),
        texts=written.texts,
        drafts={},
        curve=_curve(llm, target, f"{config.quantization}, {what_is_timed(target, None)}", progress),
        stages=written.stages,
        likeliest=written.likeliest,
        provenance=provenance(config.threads),
    )
    _guess(llm, trace, drafts, shapes, progress)
    found = {
        name: RecordedDraft(
            model=model,
            max_context=own[name].config.max_context,
            curve=recording.curve,
            guesses=recording.notes.trie(),
            measured=recording.measured,
            head=found.head.block if isinstance(found := own[name], BlockModel) else None,
        )
        for (name, recording), model in zip(drafts.items(), trace.speculation.drafts, strict=True)
    }
    return replace(trace, drafts=found)


def facts_of(llm: LLM) -> RecordedEngine:
    """What of an LLM's engine decides how its steps go on."""
    config = llm.config
    return RecordedEngine(
        vocab=llm.models.target.config.vocab_size,
        max_context=llm.max_context,
        max_step_tokens=config.scheduler.max_step_tokens,
        block_size=config.cache.block_size,
        prefix_reuse=config.cache.prefix_reuse,
        ending=tuple(sorted(llm.tokenizer.eos_token_ids)),
    )


@dataclass(frozen=True, slots=True)
class _Recording:
    """One draft while it is recorded: what its passes cost, and what it is heard to guess."""

    curve: CostCurve
    notes: GuessRecorder
    measured: dict[int, tuple[int, float]]


def _guess(
    llm: LLM,
    trace: Trace,
    drafts: Mapping[str, _Recording],
    shapes: Sequence[Shape],
    progress: Progress | None,
) -> None:
    """Let the drafts guess at every place of the trace's texts, and note it."""
    models = traced(llm.models)
    heads = {name: model for name, model in models.items() if isinstance(model, BlockModel)}
    nodes = sum(LIKELY_NODES if s.learned else s.expansion.num_nodes - 1 for s in shapes)
    room = 1 + len(heads) * MOST_NODES + (len(models) - len(heads)) * nodes
    wide = replace(llm.config.speculation, drafts=(), max_nodes=room)
    engine = replace(
        trace.engine,
        # All trees fit into a step, or they would be cut where a step of the engine has no rows left.
        max_step_tokens=trace.engine.max_step_tokens + room,
        # What another request left in shared blocks a head has not read to the end.
        prefix_reuse=trace.engine.prefix_reuse and not heads,
    )
    blocks = num_blocks(engine, wide, 1)
    speculators: list[LevelSpeculator] = []
    for name, model in models.items():
        recording = drafts[name]
        if isinstance(model, BlockModel):
            runner_of_head = HeadRunner(model, num_blocks=blocks, block_size=engine.block_size)
            own = named_tokens(model.ids, model.config.vocab_size)
            if (grow := grow_best_first(name, model, own)) is None:
                raise ConfigError(f"{name} is a head, whose trees are recorded with native kernels: use them")
            best_first = RecordedTrees(grow, recording.notes)
            trees = OnePassTrees(name, shapes[0], best_first.grow, level_drawer(name, model, own))
            speculators.append(
                BlockDraft(
                    *(name, runner_of_head.guess, model.head, trees),
                    max_rows=engine.max_step_tokens,
                    block_size=engine.block_size,
                    taps=model.head.taps,
                )
            )
            continue
        vocabulary = llm.models.named.get(name)
        for number, shape in enumerate(shapes):
            runner = ModelRunner(model, num_blocks=blocks, block_size=engine.block_size)
            speculators.append(
                DraftModel(
                    f"{name}.{number}",
                    runner,
                    shape,
                    max_rows=engine.max_step_tokens,
                    reads=ids_read(model, vocabulary),
                    draw=RecordedPasses(runner, name, vocabulary, recording.notes, recording.measured),
                )
            )
    replay = ReplayEngine(
        engine,
        speculators,
        LookingOn(),
        wide,
        CostTable(trace.curve),
        trace.stages,
        batch=1,
        states=LocalExecutor(llm.models.target, num_blocks=blocks, block_size=engine.block_size)
        if heads
        else None,
    )
    show = progress or NoProgress()
    show.start(trace.places, "guessing at every place", "tokens")
    try:
        for step in replay.play([(trace, number) for number in range(len(trace.texts))]):
            for _ in step.entries:
                show.advance(1)
                for recording in drafts.values():
                    recording.notes.close_root()
    finally:
        show.finish()


def _curve(llm: LLM, model: LanguageModel | BlockModel, variant: str, progress: Progress | None) -> CostCurve:
    """What a pass of a model costs, as an engine of the LLM's config measures it, or has measured it."""
    config, target = llm.config, llm.models.target
    size = config.cache.block_size
    rows = min(config.scheduler.max_step_tokens, model.config.max_context)
    runner: Timed
    behind: Timed | None = None
    if isinstance(model, BlockModel):
        runner = HeadRunner(model, num_blocks=-(-(rows + model.head.block_size) // size), block_size=size)
        behind = ModelRunner(target, num_blocks=1, block_size=size)
    else:
        runner = ModelRunner(model, num_blocks=-(-rows // size), block_size=size)
    return cost_curve(
        runner,
        max_rows=rows,
        variant=variant,
        every_row=model is not target,
        behind=behind,
        progress=progress,
    )


def _text(request: Request, output: RequestOutput) -> RecordedText:
    params = SamplingParams(**{name: getattr(request.params, name) for name in KEPT_PARAMS})
    return RecordedText(request.prompt_token_ids, output.token_ids, params, request.seed, request.prediction)


def _two_likeliest(output: RequestOutput) -> list[list[float]]:
    """The two highest log-probabilities at each place of an output."""
    assert output.logprobs is not None
    ranked = [sorted((one.logprob for one in at.values()), reverse=True)[:2] for at in output.logprobs]
    return [(best + [-np.inf] * 2)[:2] for best in ranked]


def _stages(done: Statistics) -> dict[str, float]:
    return {str(stage): seconds / max(1, done.steps) for stage, seconds in done.stage_seconds.items()}
