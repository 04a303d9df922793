"""The official client against a real server; texts equal those of the offline LLM."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from specinfer import LLM, SamplingParams
from tests.schemas import closed
from tests.served import Served

pytestmark = pytest.mark.thorough

# Steps are counted, so no answer is guessed from earlier ones.
OPTIONS: dict[str, Any] = {"tree_size": "fixed", "lookup": True, "lookup_memory": 0}
HI = [{"role": "user", "content": "Hi there, hi there"}]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", kv_cache_memory=1 << 24, **OPTIONS) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chat_equals_offline(client: openai.OpenAI, llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5, n=2, max_tokens=30)
    [offline] = llm.chat(HI, params)
    sampling = {"temperature": temperature, "top_p": 1.0, "seed": 5, "n": 2, "max_tokens": 30}
    options = {"model": "tiny", "messages": HI, **sampling}
    whole = client.chat.completions.create(**options)
    assert [choice.message.content or "" for choice in whole.choices] == [o.text for o in offline.outputs]
    assert [choice.finish_reason for choice in whole.choices] == [o.finish_reason for o in offline.outputs]
    assert whole.usage.prompt_tokens == len(offline.prompt_token_ids)
    assert whole.usage.completion_tokens == sum(len(o.token_ids) for o in offline.outputs)

    texts, reasons, last = ["", ""], [None, None], None
    options |= {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"trace": True}}
    for chunk in client.chat.completions.create(**options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        last = chunk
    assert texts == [o.text for o in offline.outputs]
    assert reasons == [o.finish_reason for o in offline.outputs]
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    figures = last.model_extra["metrics"]["speculative_decoding"]
    # Guesses are looked up in the answer before this one, too.
    assert 0 < figures["num_spec_steps"] <= sum(o.figures.steps for o in offline.outputs)
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
    assert sum(figures["per_step_accepted"]) == figures["num_accepted_draft_tokens"]
    assert len(figures["per_step_drafted"]) == figures["num_spec_steps"]


def test_prompts_are_gone_on_with_as_offline(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["one two one two", "three"]
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 9, "n": 2, "max_tokens": 12}
    offline = [o.text for group in llm.generate(prompts, SamplingParams(**sampling)) for o in group.outputs]
    whole = client.completions.create(model="tiny", prompt=prompts, echo=True, **sampling)
    echoed = [prompts[i // 2] + text for i, text in enumerate(offline)]
    assert [choice.text for choice in whole.choices] == echoed
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    same = client.completions.create(model="tiny", prompt=ids, **sampling)
    assert [choice.text for choice in same.choices] == offline


def test_logprobs_are_those_of_the_model(client: openai.OpenAI, llm: LLM) -> None:
    [offline] = llm.chat(HI, SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    reply = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=3, **asked)
    content = reply.choices[0].logprobs.content
    assert [t.logprob for t in content] == [next(iter(p.values())).logprob for p in offline.logprobs]
    assert [bytes(t.bytes) for t in content] == [bytes([token]) for token in offline.token_ids]
    assert all(len(t.top_logprobs) == 3 for t in content)
    assert all(t.top_logprobs[0].logprob == max(x.logprob for x in t.top_logprobs) for t in content)
    lists = client.completions.create(prompt="Hi", logprobs=2, **asked).choices[0].logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == 6


def test_a_form_a_stop_and_a_prediction(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        # With other seeds, random weights reason to the end.
        return client.chat.completions.create(model="tiny", messages=HI, seed=4, **more)

    schema = closed({"a": {"type": "boolean"}})
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = ask(max_tokens=100, response_format=form)
    assert json.loads(answer.choices[0].message.content)["a"] in (True, False)
    text = ask(extra_body={"choice": ["red", "blue"]}).choices[0].message.content
    assert text in ("red", "blue")
    guessed = ask(prediction={"type": "content", "content": text}, extra_body={"choice": [text]})
    details = guessed.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 9, "stop": ["d"]}
    cut = client.completions.create(model="tiny", extra_body={"regex": "ab[cd]{3}"}, **asked)
    assert cut.choices[0].text in ("ab", "abc", "abcc", "abccc")


def test_tokens_and_models_that_are_not_served(client: openai.OpenAI, served: Served) -> None:
    reply = served.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert reply["tokens"] == [97, 98, 99]
    assert (reply["count"], reply["max_model_len"]) == (3, 2048)
    assert served.post("/tokenize", {"messages": HI}).json()["count"] > 10
    assert served.post("/detokenize", {"tokens": [97, 98]}).json() == {"prompt": "ab"}
    assert "ids of the vocabulary" in served.post("/detokenize", {"tokens": [300]}).json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="embeddings are not supported"):
        client.embeddings.create(model="tiny", input="x")


def test_refusals_of_the_engine_are_client_errors_also_in_streams(client: openai.OpenAI) -> None:
    create: Any = partial(client.completions.create, model="tiny", prompt="x")
    eagle = {"speculation": {"speculators": ["eagle"]}}
    with pytest.raises(openai.BadRequestError, match="names 'eagle'; this engine has") as error:
        client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_body=eagle)
    assert error.value.body["param"] == "speculation"
    with pytest.raises(openai.BadRequestError) as error:
        create(prompt="x" * 2100)
    assert error.value.body["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        create(extra_body={"regex": "("})
    assert error.value.body["param"] == "regex"


LISBON = [{"role": "user", "content": "Is it warm in Lisbon?"}]
CITIES = ["Lisbon", "Porto"]
PARAMETERS = closed({"city": {"enum": CITIES}, "unit": {"enum": ["C", "F"]}})
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
# Random weights would reason forever before a required call; reasoning may start with any blank.
BLANKS = (9, 10, 11, 12, 13, 28, 29, 30, 31, 32, 194, 225, 226, 227)
NO_REASONING = {"bad_words": ["<th"], "logit_bias": {str(byte): -100 for byte in BLANKS}}
TIME = {"type": "function", "function": {"name": "time", "description": "What time it is."}}


def test_a_call_that_is_required_is_made_and_its_arguments_follow_the_schema(client: openai.OpenAI) -> None:
    for seed in range(3):
        options: dict[str, Any] = {"model": "tiny", "messages": LISBON, "max_tokens": 300, "seed": seed}
        options |= {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
        options["extra_body"] = NO_REASONING
        choice = client.chat.completions.create(**options).choices[0]
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        given = json.loads(call.function.arguments)
        weathers = [{"city": city, "unit": unit} for city in CITIES for unit in ("C", "F")]
        assert given in ([{}] if call.function.name == "time" else weathers)
        assert not (choice.message.content or "").strip()
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
        pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
        assert {piece.index for piece in pieces} == {0}
        assert "".join(piece.function.name or "" for piece in pieces) == call.function.name
        assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
        assert "".join(piece.id or "" for piece in pieces).startswith("call_")
        assert "tool_call" not in "".join(chunk.delta.content or "" for chunk in chunks)
        assert chunks[-1].finish_reason == "tool_calls"


def test_reasoning_is_in_a_separate_field(client: openai.OpenAI) -> None:
    form = {"regex": "<think>\nhm, let me see\n</think>\n\nYes[.]"}
    options: dict[str, Any] = {"model": "tiny", "messages": LISBON, "max_tokens": 60, "extra_body": form}
    answer = client.chat.completions.create(**options)
    marked = len("<think>\nhm, let me see\n</think>")
    assert answer.usage.completion_tokens_details.reasoning_tokens == marked  # a token is a byte
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
    for messages in ([answer.choices[0].message], deltas):
        said = [message.model_dump() for message in messages]
        assert "".join(one.get("reasoning_content") or "" for one in said) == "hm, let me see"
        assert "".join(one.get("content") or "" for one in said) == "Yes."
