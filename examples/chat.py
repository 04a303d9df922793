"""Chat: each request contains the messages so far."""

from specinfer import LLM, SamplingParams

llm = LLM("smollm2-135m", lookup=True)
params = SamplingParams(temperature=0, max_tokens=96)
messages = [{"role": "system", "content": "Answer in one short sentence."}]

for question in ("Name a river in Egypt.", "Where does it end?"):
    messages.append({"role": "user", "content": question})
    [output] = llm.chat(messages, params)
    messages.append({"role": "assistant", "content": output.text})
    print(f"> {question}\n{output.text}\n")
