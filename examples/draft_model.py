"""Merge the proposals of a draft model and of lookups into one tree per step.

python examples/draft_model.py TARGET DRAFT      (names, GGUF files or folders, as in docs/checkpoints.md)
"""

import sys

from specinfer import LLM, SamplingParams

if len(sys.argv) != 3:
    print("usage: python examples/draft_model.py TARGET DRAFT", file=sys.stderr)
    sys.exit(2)

# A fixed size shows a tree in every step; by default the engine leaves out guesses that save no time here.
llm = LLM(sys.argv[1], drafts=[sys.argv[2]], lookup=True, tree_size="fixed")
question = [{"role": "user", "content": "Write a Python function that merges two sorted lists."}]

[output] = llm.chat(question, SamplingParams(temperature=0, max_tokens=200))
figures = output.figures
print(output.text)
print(f"\n{figures.steps} steps, {figures.tokens_per_step:.2f} tokens per step")
for depth, accepted in enumerate(figures.accepted_per_depth, start=1):
    print(f"  depth {depth}: accepted in {accepted} of {figures.drafted_per_depth[depth - 1]} steps")
print("  accepted by:", figures.accepted_by)
