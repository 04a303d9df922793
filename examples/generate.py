"""Answer a batch of prompts and print the speculation figures of each."""

from specinfer import LLM, SamplingParams

llm = LLM("smollm2-135m", lookup=True)
questions = ["Name three rivers.", "Count to ten, twice.", "What is a token tree?"]
chats = [[{"role": "user", "content": question}] for question in questions]

for output in llm.chat(chats, SamplingParams(temperature=0, max_tokens=64)):
    print(output.text.strip())
    print(f"  [{output.figures.tokens_per_step:.2f} tokens per step, {output.figures.accepted_by}]\n")
