"""Everything specinfer promises, tested one after the other on loaded models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from specinfer.check import identity, law
from specinfer.check.verdict import Verdict
from specinfer.config import SpeculationConfig
from specinfer.errors import IntegrityError
from specinfer.llm import LLM
from specinfer.tree.expansion import Expansion

# Trees for counting: wide where the counted tokens are, whatever the tree that is served with.
LAW_EXPANSION = Expansion((3, 2))
LAW_BRANCHES = 3


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried."""

    max_tokens: int = 48  # of each text
    samples: int = 400  # requests counted for each law
    alone: int = 4  # texts that are also generated one at a time


def check_promise(
    llm: LLM, prompts: Sequence[Sequence[int]], effort: Effort, *, on_part: Callable[[], None]
) -> Iterator[Verdict]:
    """Verdicts as they are reached; `llm` is the speculating engine, `prompts` its token ids.

    `on_part` is called after each of the `num_parts` pieces of work. Texts are compared with the coupled
    verifier, which keeps them; laws are counted with both verifiers. Where a lossless verifier would need
    another draw rule than `llm` is configured with, its default rule is used.
    """
    speculation = llm.config.speculation
    plain = _engine(llm, SpeculationConfig())
    coupled = _engine(llm, _with_verifier(speculation, "coupled"))
    for name, sampling in identity.SAMPLING.items():
        params = replace(sampling, max_tokens=effort.max_tokens)
        yield from identity.check_identity(name, params, prompts, plain, coupled, alone=effort.alone)
        on_part()
    engines = [plain, coupled]
    prompt = llm.tokenizer.encode(law.PROMPT)
    for verifier in ("coupled", "mss"):
        tree = replace(
            _with_verifier(speculation, verifier),
            expansion=LAW_EXPANSION,
            ngram_branches=max(LAW_BRANCHES, speculation.ngram_branches),
        )
        engine = _engine(llm, tree)
        engines.append(engine)
        for name, sampling in law.SAMPLING.items():
            yield law.check_law(f"law, {verifier}, {name}", sampling, prompt, engine, effort.samples)
            on_part()
    yield check_bookkeeping(engines)
    on_part()


def num_parts() -> int:
    """How often `check_promise` calls `on_part`."""
    return len(identity.SAMPLING) + 2 * len(law.SAMPLING) + 1


def check_bookkeeping(engines: Sequence[LLM]) -> Verdict:
    """Idle engines must hold no request, and every block of their caches must be free."""
    name = "bookkeeping"
    try:
        for engine in engines:
            engine.engine.check_integrity()
            if engine.engine.has_work:
                return Verdict(name, False, "an engine still has work after all its requests have ended")
    except (AssertionError, IntegrityError) as error:
        return Verdict(name, False, f"an invariant is broken: {error}")
    return Verdict(name, True, f"{len(engines)} engines are idle, and hold no request and no cache block")


def _with_verifier(speculation: SpeculationConfig, verifier: str) -> SpeculationConfig:
    draw = speculation.draw if speculation.verifier == verifier or speculation.draw == "top_k" else None
    if verifier == "mss":
        return replace(speculation, verifier="mss", draw=draw)
    return replace(speculation, verifier="coupled", draw=draw)


def _engine(llm: LLM, speculation: SpeculationConfig) -> LLM:
    """An engine over the same models, drafts only where they are asked for."""
    models = llm.models if speculation.drafts else replace(llm.models, drafts={})
    return LLM.from_models(replace(llm.config, speculation=speculation), models)
