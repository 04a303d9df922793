"""Records traces: the target writes the texts once, then the drafts propose at every position.

The drafts run in a replay whose policy verifies no proposals, so every step adds one token: they read and
propose as in an engine that accepts none. With heads among them the target also reads the texts, as heads
need its hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.replay.baselines import RootsOnly
from benchmarks.replay.drafts import DraftNotes, RecordedPasses, RecordedTrees, TracedDraft
from benchmarks.replay.engine import ReplayEngine, num_blocks
from benchmarks.replay.trace import DEPTH, KEPT_PARAMS, RecordedDraft, RecordedEngine, RecordedText, Trace
from specinfer.engine.costs import measure_curves
from specinfer.engine.drafts import embedding_limit
from specinfer.engine.models import Models
from specinfer.errors import ConfigError, RequestError
from specinfer.heads.block import BlockModel
from specinfer.heads.runner import HeadModel, HeadRunner
from specinfer.llm import LLM
from specinfer.models.language_model import LanguageModel
from specinfer.progress import NoProgress, Progress
from specinfer.report.provenance import provenance
from specinfer.request import Request, RequestOutput
from specinfer.runtime.executor import LocalExecutor
from specinfer.runtime.runner import ModelRunner
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import named_tokens
from specinfer.speculate.drafts.growth import LIKELY_NODES, Shape
from specinfer.speculate.drafts.head_drafts import BlockDraft
from specinfer.speculate.drafts.one_pass import MAX_NODES, OnePassTrees, grow_best_first, level_drawer
from specinfer.speculate.speculator import LevelSpeculator
from specinfer.speculation_config import NO_SPECULATION, SpeculationConfig
from specinfer.tree.draw import DrawRule
from specinfer.tree.expansion import Expansion

WIDTH: Final = 8  # children recorded at the root and below the deepest nodes, where they add no cost
# Parameters that a trace need not keep: they change no text, or it has their effect elsewhere.
_ELSEWHERE: Final = (
    "seed",
    "prediction",
    "logprobs",
    "prompt_logprobs",
    "logprobs_mode",
    "visible_token_ids",
)


def shapes_of(speculation: SpeculationConfig) -> list[Shape]:
    """Return the default shapes of recorded draft trees.

    The first is the engine's shape, DEPTH levels deep. The second, for policies with other shapes, has all
    likely paths, or is wide at the root.
    """
    expansion, rule = speculation.fixed_expansion, speculation.draw_rule
    deep = expansion.deepened(DEPTH).widths
    first = Shape(Expansion((*deep[:-1], max(WIDTH, deep[-1]))), rule)
    if not isinstance(speculation.expansion, Expansion):
        return [first, learned_shape(speculation)]
    return [first, Shape(Expansion((WIDTH, 2, *[1] * (DEPTH - 3), WIDTH)), rule)]


def learned_shape(speculation: SpeculationConfig) -> Shape:
    """Return the shape with all likely paths, which contains every learned shape."""
    usual, rule = speculation.fixed_expansion, speculation.draw_rule
    return Shape(usual, rule, learned=True, nodes=LIKELY_NODES, min_probability=0.0)


def record(
    llm: LLM,
    requests: Sequence[Request],
    *,
    shapes: Sequence[Shape] = (),
    progress: Progress | None = None,
) -> Trace:
    """Record a trace of the target's answers and its drafts' proposals at every position.

    A draft proposes in all `shapes` below every root; the trace keeps the union of the trees. Raises
    ConfigError if drafts draw samples, RequestError for parameters that a trace does not keep.
    """
    check(llm, requests)
    config, models = llm.config, llm.models
    progress = progress or NoProgress()
    outputs, stages = _written(llm, requests, progress)
    own = traced(models)
    rows = config.scheduler.row_limit
    curves = measure_curves(config, models, rows + max(map(_block_size, own.values()), default=0), progress)
    trace = Trace(
        model=Path(config.model).name,
        engine=RecordedEngine(
            vocab=models.target.config.vocab_size,
            max_context=llm.max_context,
            max_step_tokens=rows,
            block_size=config.cache.block_size,
            prefix_reuse=config.cache.prefix_reuse,
            ending=tuple(sorted(llm.tokenizer.eos_token_ids)),
        ),
        speculation=replace(
            config.speculation, drafts=tuple(Path(name).name for name in config.speculation.drafts)
        ),
        texts=tuple(_text(*pair) for pair in zip(requests, outputs, strict=True)),
        drafts={},
        curve=curves.target,
        stages=stages,
        likeliest=np.array([row for output in outputs for row in _two_likeliest(output)], dtype=np.float32),
        provenance=provenance(config.threads),
    )
    notes = {name: DraftNotes() for name in own}
    _guess(llm, trace, notes, shapes or shapes_of(config.speculation), progress)
    drafts = {
        name: RecordedDraft(
            model=model,
            max_context=own[name].config.max_context,
            curve=curves.drafts[name],
            guesses=heard.guesses.trie(),
            measured=heard.measured,
            head=found.head.block if isinstance(found := own[name], BlockModel) else None,
        )
        for (name, heard), model in zip(notes.items(), trace.speculation.drafts, strict=True)
    }
    return replace(trace, drafts=drafts)


def check(llm: LLM, requests: Sequence[Request]) -> None:
    """Raise ConfigError or RequestError if a replay would differ from the engine."""
    speculation = llm.config.speculation
    exact = (DrawRule.POINT_MASS, DrawRule.COUPLED)
    if speculation.verifier != "coupled" or speculation.draw_rule not in exact:
        raise ConfigError(
            f"the verifier is {speculation.verifier!r} and drafts draw by {speculation.draw_rule}; traces "
            "need the coupled rule, whose text does not depend on the proposals"
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
                raise RequestError(f"{f.name} is {value!r}, and traces do not keep it; omit it", f.name)
        if heads:
            _check_best_first(request.params, heads[0])


def _check_best_first(params: SamplingParams, head: str) -> None:
    """Raise RequestError if a head would draw its trees level by level, which is not recorded."""
    unset = SamplingParams()
    names = ("min_tokens", *(() if params.greedy else ("top_k", "top_p", "min_p")))
    for name in names:
        if (value := getattr(params, name)) != getattr(unset, name):
            raise RequestError(
                f"{name} is {value!r}, where head {head} draws its trees level by level; traces keep "
                "best-first trees only: omit it",
                name,
            )


def traced(models: Models) -> dict[str, LanguageModel | BlockModel]:
    """Return the drafts that a trace can keep; raises ConfigError for another kind."""
    found: dict[str, LanguageModel | BlockModel] = {}
    for name, draft in models.drafts.items():
        reason = ""
        if name in models.foreign:
            reason = "has another vocabulary than the target"
        elif isinstance(draft, HeadModel) and not isinstance(draft, BlockModel):
            reason = "is a head that guesses no block"
        elif (
            isinstance(draft, BlockModel) and not draft.head.causal and draft.head.block_size > MAX_NODES + 1
        ):
            # The number of rows that see each other depends on the largest tree.
            reason = f"has blocks of {draft.head.block_size} rows, more than trees have nodes"
        else:
            found[name] = draft
        if reason:
            raise ConfigError(
                f"{name} {reason}; traces are recorded of block heads, and of models of the target's "
                "vocabulary: leave it out"
            )
    return found


def _written(
    llm: LLM, requests: Sequence[Request], progress: Progress
) -> tuple[list[RequestOutput], dict[str, float]]:
    """Return the target's answers without speculation, and the mean seconds of each stage of a step.

    The first request runs alone to time the stages, the others in batches.
    """
    plain = llm.variant(replace(llm.config, speculation=NO_SPECULATION))
    before = plain.statistics()
    prompts = [request.prompt_token_ids for request in requests]
    params = [
        replace(request.params, seed=request.seed, n=1, prediction=None, logprobs=2) for request in requests
    ]

    def on_output(output: RequestOutput) -> None:
        if output.error is not None:
            raise RequestError(output.error)
        if output.finished:
            progress.advance(1)

    progress.start(len(requests), "writing texts", "texts")
    try:
        outputs = plain.generate(prompts[:1], params[:1], on_output=on_output)
        done = plain.statistics().since(before)
        if prompts[1:]:
            outputs += plain.generate(prompts[1:], params[1:], on_output=on_output)
    finally:
        progress.finish()
        plain.close()
    stages = {str(stage): seconds / max(1, done.steps) for stage, seconds in done.stage_seconds.items()}
    return outputs, stages


def _block_size(model: LanguageModel | BlockModel) -> int:
    """Return the rows of a draft's pass besides the tokens it reads."""
    return model.head.block_size if isinstance(model, BlockModel) else 0


def _guess(
    llm: LLM,
    trace: Trace,
    notes: Mapping[str, DraftNotes],
    shapes: Sequence[Shape],
    progress: Progress,
) -> None:
    """Run the drafts at every position of the trace's texts and record their proposals."""
    models = traced(llm.models)
    heads = {name: model for name, model in models.items() if isinstance(model, BlockModel)}
    nodes = sum(LIKELY_NODES if s.learned else s.expansion.num_nodes - 1 for s in shapes)
    room = 1 + len(heads) * MAX_NODES + (len(models) - len(heads)) * nodes
    wide = replace(llm.config.speculation, drafts=(), max_nodes=room)
    engine = replace(
        trace.engine,
        # All trees fit into a step; else the engine would cut them for lack of rows.
        max_step_tokens=trace.engine.max_step_tokens + room,
        # A head has not read all KV of prefixes that other requests left in shared blocks.
        prefix_reuse=trace.engine.prefix_reuse and not heads,
    )
    blocks = num_blocks(engine, wide, 1)
    speculators: list[LevelSpeculator] = []
    for name, model in models.items():
        if isinstance(model, BlockModel):
            runner_of_head = HeadRunner(model, num_blocks=blocks, block_size=engine.block_size)
            own = named_tokens(model.ids, model.config.vocab_size)
            if (grow := grow_best_first(name, model, own)) is None:
                raise ConfigError(f"{name} is a head; recording its trees needs native kernels")
            best_first = RecordedTrees(grow, notes[name].guesses)
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
                TracedDraft(
                    RecordedPasses(runner, name, vocabulary, notes[name]),
                    f"{name}.{number}",
                    runner,
                    shape,
                    max_rows=engine.max_step_tokens,
                    reads=embedding_limit(model, vocabulary),
                )
            )
    states = LocalExecutor(llm.models.target, num_blocks=blocks, block_size=engine.block_size)
    replay = ReplayEngine(
        replace(trace, engine=engine),
        speculators,
        RootsOnly(),
        wide,
        batch=1,
        states=states if heads else None,
    )
    with progress.showing(trace.places, "guessing at every place", "tokens"):
        for step in replay.play([(trace, number) for number in range(len(trace.texts))]):
            for _ in step.entries:
                progress.advance(1)
                for heard in notes.values():
                    heard.guesses.close_root()


def _text(request: Request, output: RequestOutput) -> RecordedText:
    params = SamplingParams(**{name: getattr(request.params, name) for name in KEPT_PARAMS})
    return RecordedText(request.prompt_token_ids, output.token_ids, params, request.seed, request.prediction)


def _two_likeliest(output: RequestOutput) -> list[list[float]]:
    """Return the two highest log-probabilities at each position of an output."""
    assert output.logprobs is not None
    ranked = [sorted((one.logprob for one in at.values()), reverse=True)[:2] for at in output.logprobs]
    return [(best + [-np.inf] * 2)[:2] for best in ranked]
