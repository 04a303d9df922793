"""A tiny target with one speculator, and its greedy answer to one prompt."""

from __future__ import annotations

from specinfer.engine.admission import Admission
from specinfer.engine.engine import Engine
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.scheduler import Scheduler
from specinfer.request import Request, RequestOutput
from specinfer.runtime.executor import Executor
from specinfer.sampling_params import SamplingParams
from specinfer.scheduler_config import SchedulerConfig
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.speculator import Speculator
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree.draw import Verifier

from .engines import Tiny, slow_generate

PROMPT = (1, 2, 3, 2)
PARAMS = SamplingParams(temperature=0, max_tokens=30)


def expected(tiny: Tiny) -> list[int]:
    """Return the target's answer without speculation."""
    return slow_generate(tiny.target, PROMPT, PARAMS)


def answer(
    tiny: Tiny,
    speculator: Speculator,
    verifier: Verifier,
    *,
    request_id: str = "r",
    prediction: tuple[int, ...] = (),
) -> RequestOutput:
    """Return the answer with a context of 64 and trees of at most 4 nodes; checks the engine."""
    request = Request(request_id, PROMPT, PARAMS, seed=0, prediction=prediction)
    pool = BlockPool(num_blocks=8, block_size=16)
    engine = Engine(
        executor=Executor(tiny.target, num_blocks=8, block_size=16),
        speculators=Ensemble([speculator], vocab=tiny.target.config.vocab_size, policy=SpeculationPolicy()),
        tokenizer=tiny.tokenizer,
        admission=Admission(
            tiny.tokenizer,
            SpeculationLimits(SpeculationConfig(lookup=False, max_nodes=4), [speculator]),
            vocab=tiny.target.config.vocab_size,
            max_context=64,
            capacity=128,
        ),
        scheduler=Scheduler(SchedulerConfig(), pool, tree_nodes=4, max_context=64),
        verifier=verifier,
    )
    admitted = engine.admission.admit(request)
    engine.add(admitted)
    while True:
        for delta in engine.step():
            if delta.finished:
                engine.check_integrity()
                return admitted.transcript.output()
