"""Random lives of engines with recurrent states: aborts, failed passes, preemptions, few slots."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specinfer.engine import build
from specinfer.engine.admission import AdmittedRequest
from specinfer.request import Request
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, engine_of
from tests.recurrent import CountingModel, answer, counting

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(20))
def test_every_text_is_that_of_its_states(seed: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, models = random.Random(seed), counting(tiny.tokenizer)
    monkeypatch.setattr(build, "MAX_CHECKPOINTS", chance.choice([2, 3, 8, 256]))
    drafts = chance.choice([[], ["similar"], ["similar", "stranger"]])
    batch, blocks = chance.choice([1, 3, 6]), chance.choice([40, 60, 300])
    llm = models.llm(
        drafts,
        block_size=4,
        kv_cache_memory=(2 * batch * 260 + blocks * 256 + 1024)
        * (1 + len(drafts)),  # bytes of slots, KV, copies
        max_step_tokens=chance.choice([8, 16, 40]),
        max_batch_size=batch,
        lookup=chance.random() < 0.5,
    )
    engine, live, ended = engine_of(llm), list[AdmittedRequest](), 0
    texts = [[chance.randrange(64) for _ in range(60)] for _ in range(3)]
    for number in range(120):
        if chance.random() < 0.35 and len(live) < 10:
            prompt = [*chance.choice(texts)[: chance.randrange(1, 70)], *range(chance.randrange(5))]
            params = replace(GREEDY, max_tokens=chance.randrange(1, 40))
            live.append(engine.admission.admit(Request(str(number), tuple(prompt), params, seed=0)))
            engine.add(live[-1])
        if live and chance.random() < 0.06:
            engine.abort(live.pop(chance.randrange(len(live))).request.request_id)
        if chance.random() < 0.04:
            failing = chance.choice([models.target, models.similar])
            assert isinstance(failing, CountingModel)
            failing.fails = 1
        try:
            engine.step()
        except RuntimeError as error:
            engine.fail(error)
        engine.check_integrity()
        for one in [one for one in live if one.transcript.finished]:
            live.remove(one)
            found, prompt = one.transcript.output(), list(one.request.prompt_token_ids)
            said = answer(prompt, one.request.params.max_tokens)
            assert list(found.token_ids) == said[: len(found.token_ids)]
            assert found.finish_reason == "error" or len(found.token_ids) == len(said)
            texts.append([*prompt, *found.token_ids])
            ended += 1
    assert ended > 4
