"""Runs all checks on loaded models."""

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
    """Amount of work of the checks."""

    max_tokens: int = 48  # per text
    samples: int = 48  # texts per law
    num_single: int = 4  # texts that are also generated one at a time and repeated


def check_promise(
    llm: LLM, prompts: Sequence[Sequence[int]], effort: Effort, progress: Progress | None = None
) -> Iterator[Verdict]:
    """Yield verdicts; `llm` is the speculating engine, `prompts` its token ids.

    Texts are compared with the coupled verifier, which preserves them; laws are tested with both verifiers.
    If several ranks share the target, they are also compared with one process, which then holds the whole
    target.

    If the configured draw rule is not lossless under a verifier, the verifier's default rule replaces it.
    Trees have their full size whatever they cost, so that more tokens are proposed.
    """
    progress = progress or NoProgress()
    configured = llm.config.speculation

    def engine(speculation: SpeculationConfig) -> LLM:
        return engine_like(llm, speculation, prompts, effort)

    plain, coupled = engine(NO_SPECULATION), engine(with_verifier(configured, "coupled"))
    engines = [plain, coupled]
    texts = {name: replace(of, max_tokens=effort.max_tokens) for name, of in identity.SAMPLING.items()}
    for name, params in texts.items():
        yield from identity.check_identity(
            name, params, prompts, plain, coupled, num_single=effort.num_single, progress=progress
        )
    ranks = llm.config.ranks
    if ranks > 1:
        with LLM(replace(llm.config.single_process, speculation=NO_SPECULATION)) as one:
            for name, params in texts.items():
                ways = f"{name}, in one process and on {ranks} ranks"
                yield from identity.check_identity(
                    ways, params, prompts, one, coupled, num_single=0, progress=progress
                )
    for name in identity.TWICE:
        again = f"{name}, same request twice"
        yield identity.check_repetition(
            again, texts[name], prompts[: effort.num_single], coupled, progress=progress
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
    """Check that idle engines hold no request and no cache block, and that no speculator failed.

    One that raises pauses: the texts stay right, and the figures would be those of another engine.
    """
    name = "bookkeeping"
    try:
        for number, llm in enumerate(engines, start=1):
            llm.check_integrity()
            statistics = llm.statistics()
            if statistics.running or statistics.waiting:
                return Verdict(name, False, f"engine {number} has work left after all its requests ended")
            if failed := statistics.failures:
                counts = ", ".join(f"{part} {times} times" for part, times in failed.items())
                return Verdict(name, False, f"engine {number} went on after errors in its log: {counts}")
    except IntegrityError as error:
        return Verdict(name, False, f"an invariant is broken: {error}")
    return Verdict(name, True, f"{len(engines)} engines are idle and hold no request and no cache block")


def engine_like(
    llm: LLM, speculation: SpeculationConfig, prompts: Sequence[Sequence[int]], effort: Effort
) -> LLM:
    """Return an engine over the models of `llm` with other speculators and space for `prompts`."""
    longest = max(map(len, prompts)) + effort.max_tokens
    context = min(longest, llm.max_context)  # several engines share the memory, so each gets a small context
    config = replace(llm.config, speculation=speculation.with_tree_size("fixed"))
    return llm.variant(config, max_context=context)


def with_verifier(speculation: SpeculationConfig, verifier: Verifier) -> SpeculationConfig:
    """Return the speculators under `verifier`; its default replaces a draw rule that it does not accept."""
    draw = speculation.draw if speculation.draw in PAIRS[verifier].draws else None
    return replace(speculation, verifier=verifier, draw=draw)
