"""Everything specinfer promises, tested one after the other on loaded models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specinfer.check import identity, law
from specinfer.check.difference import Verdict
from specinfer.errors import IntegrityError
from specinfer.llm import LLM
from specinfer.progress import NoProgress, Progress
from specinfer.speculation_config import NO_SPECULATION, SpeculationConfig
from specinfer.tree.draw import PAIRS, Verifier


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried."""

    max_tokens: int = 48  # of each text
    samples: int = 48  # texts counted for each law
    alone: int = 4  # texts that are also generated one at a time, and twice


def check_promise(
    llm: LLM, prompts: Sequence[Sequence[int]], effort: Effort, progress: Progress | None = None
) -> Iterator[Verdict]:
    """Verdicts as they are reached; `llm` is the speculating engine, `prompts` its token ids.

    Texts are compared with the coupled verifier, the one that keeps them; laws are counted with both. Where
    several ranks share the target, they are compared with those of one process, too, which then has all of
    the target.
    A verifier for which the configured draw rule is not lossless gets its own default rule. Trees have their
    full size, whether they pay here or not: what is tested is guesses.
    """
    progress = progress or NoProgress()
    configured = llm.config.speculation

    def engine(speculation: SpeculationConfig) -> LLM:
        return engine_like(llm, speculation, prompts, effort)

    plain, coupled = engine(NO_SPECULATION), engine(with_verifier(configured, "coupled"))
    engines = [plain, coupled]
    for name, sampling in identity.SAMPLING.items():
        params = replace(sampling, max_tokens=effort.max_tokens)
        yield from identity.check_identity(
            name, params, prompts, plain, coupled, alone=effort.alone, progress=progress
        )
    ranks = llm.config.ranks
    if ranks > 1:
        with LLM(replace(llm.config.alone, speculation=NO_SPECULATION)) as one:
            for name, sampling in identity.SAMPLING.items():
                params = replace(sampling, max_tokens=effort.max_tokens)
                yield identity.check_ranks(
                    f"{name}, in one process and on {ranks} ranks",
                    params,
                    prompts,
                    one,
                    coupled,
                    progress=progress,
                )
    for name in identity.TWICE:
        params = replace(identity.SAMPLING[name], max_tokens=effort.max_tokens)
        yield identity.check_repetition(
            f"{name}, same request twice", params, prompts[: effort.alone], coupled, progress=progress
        )
    for verifier in PAIRS:
        engines.append(engine(with_verifier(configured, verifier)))
        for name, sampling in law.SAMPLING.items():
            params = replace(sampling, max_tokens=effort.max_tokens)
            yield law.check_law(
                f"law, {verifier}, {name}", params, prompts, engines[-1], effort.samples, progress
            )
    yield check_bookkeeping(engines)


def check_bookkeeping(engines: Sequence[LLM]) -> Verdict:
    """Idle engines must hold no request, and every block of their caches must be free."""
    name = "bookkeeping"
    try:
        for number, llm in enumerate(engines, start=1):
            llm.check_integrity()
            statistics = llm.statistics()
            if statistics.running or statistics.waiting:
                return Verdict(name, False, f"engine {number} has work left after all its requests ended")
    except IntegrityError as error:
        return Verdict(name, False, f"an invariant is broken: {error}")
    return Verdict(name, True, f"{len(engines)} engines are idle and hold no request and no cache block")


def engine_like(
    llm: LLM, speculation: SpeculationConfig, prompts: Sequence[Sequence[int]], effort: Effort
) -> LLM:
    """An engine over the models of `llm` with other speculators, their full trees, and room for `prompts`."""
    longest = max(map(len, prompts)) + effort.max_tokens
    context = min(longest, llm.max_context)  # several engines share the memory: none has too much
    config = replace(llm.config, speculation=speculation.with_tree_size("fixed"))
    return llm.variant(config, max_context=context)


def with_verifier(speculation: SpeculationConfig, verifier: Verifier) -> SpeculationConfig:
    """The same speculators under `verifier`; a draw rule it does not accept is replaced by its default."""
    draw = speculation.draw if speculation.draw in PAIRS[verifier].draws else None
    return replace(speculation, verifier=verifier, draw=draw)
