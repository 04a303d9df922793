"""Print an answer as it arrives; a seed gives the same text with and without speculation."""

from specinfer import LLM, SamplingParams

params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=80)
question = [{"role": "user", "content": "Tell me about the sea in three sentences."}]

for lookup in (True, False):
    llm = LLM("smollm2-135m", lookup=lookup)
    for output in llm.stream_chat(question, params):
        print(output.new_text, end="", flush=True)
    print(f"\n  [{output.figures.tokens_per_step:.2f} tokens per step]\n")
