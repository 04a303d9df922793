"""Records traces: the target writes texts once, then the drafts guess at every place of them.

The drafts run in a replay whose policy verifies nothing, so that every step adds one token: they read and
guess as they would in an engine that decodes these texts without luck. Where heads are among them the target
reads the texts along with them, as they read its hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Final

import numpy as np

from specinfer.engine.build import measured_alone
from specinfer.engine.drafts import ids_read
from specinfer.engine.models import Models
from specinfer.errors import ConfigError, RequestError
from specinfer.heads.block import BlockModel
from specinfer.heads.runner import HeadModel, HeadRunner
from specinfer.llm import LLM
from specinfer.models.language_model import LanguageModel
from specinfer.progress import NoProgress, Progress
from specinfer.replay.baselines import LookingOn
from specinfer.replay.drafts import DraftNotes, RecordedPasses, RecordedTrees
from specinfer.replay.engine import ReplayEngine, num_blocks
from specinfer.replay.trace import DEPTH, KEPT_PARAMS, RecordedDraft, RecordedEngine, RecordedText, Trace
from specinfer.report.provenance import provenance
from specinfer.request import Request, RequestOutput
from specinfer.runtime.executor import LocalExecutor, ModelRunner
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft import DraftModel
from specinfer.speculate.drafts.draft_tokens import named_tokens
from specinfer.speculate.drafts.growth import LIKELY_NODES, Shape
from specinfer.speculate.drafts.head_drafts import BlockDraft
from specinfer.speculate.drafts.one_pass import MOST_NODES, OnePassTrees, grow_best_first, level_drawer
from specinfer.speculate.speculator import LevelSpeculator
from specinfer.speculation_config import NO_SPECULATION, SpeculationConfig
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
    """A trace of what the LLM's target answers, with the guesses of its drafts at every place of the answers.

    A draft guesses in all `shapes` below every root; what is kept is the union of its trees. Raises
    ConfigError where drafts draw samples, RequestError for parameters that a trace does not keep.
    """
    check(llm, requests)
    config, models = llm.config, llm.models
    progress = progress or NoProgress()
    outputs, stages = _written(llm, requests, progress)
    own = traced(models)
    rows = config.scheduler.most_step_tokens
    curves = measured_alone(config, models, rows + max(map(_block_size, own.values()), default=0), progress)
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


def _written(
    llm: LLM, requests: Sequence[Request], progress: Progress
) -> tuple[list[RequestOutput], dict[str, float]]:
    """What the target answers without speculation, and the seconds of each stage of a step, on average.

    The first request runs alone, which shows what a step's stages take, the others in batches.
    """
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
            progress.advance(1)

    progress.start(len(requests), "writing texts", "texts")
    try:
        outputs = plain.generate(prompts[:1], params[:1], on_output=hear)
        done = plain.statistics().since(before)
        if prompts[1:]:
            outputs += plain.generate(prompts[1:], params[1:], on_output=hear)
    finally:
        progress.finish()
        plain.close()
    stages = {str(stage): seconds / max(1, done.steps) for stage, seconds in done.stage_seconds.items()}
    return outputs, stages


def _block_size(model: LanguageModel | BlockModel) -> int:
    """Rows of a draft's pass besides those it reads."""
    return model.head.block_size if isinstance(model, BlockModel) else 0


def _guess(
    llm: LLM,
    trace: Trace,
    notes: Mapping[str, DraftNotes],
    shapes: Sequence[Shape],
    progress: Progress,
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
        if isinstance(model, BlockModel):
            runner_of_head = HeadRunner(model, num_blocks=blocks, block_size=engine.block_size)
            own = named_tokens(model.ids, model.config.vocab_size)
            if (grow := grow_best_first(name, model, own)) is None:
                raise ConfigError(f"{name} is a head, whose trees are recorded with native kernels: use them")
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
                DraftModel(
                    f"{name}.{number}",
                    runner,
                    shape,
                    max_rows=engine.max_step_tokens,
                    reads=ids_read(model, vocabulary),
                    draw=RecordedPasses(runner, name, vocabulary, notes[name]),
                )
            )
    states = LocalExecutor(llm.models.target, num_blocks=blocks, block_size=engine.block_size)
    replay = ReplayEngine(
        replace(trace, engine=engine),
        speculators,
        LookingOn(),
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
    """The two highest log-probabilities at each place of an output."""
    assert output.logprobs is not None
    ranked = [sorted((one.logprob for one in at.values()), reverse=True)[:2] for at in output.logprobs]
    return [(best + [-np.inf] * 2)[:2] for best in ranked]
