"""Run a model larger than the given memory: each pass reads layers from disk."""

from specinfer import LLM, SamplingParams
from specinfer.progress import ProgressBar

question = [{"role": "user", "content": "Name three rivers, and say where each of them ends."}]
params = SamplingParams(temperature=0, max_tokens=48)

# This limits the whole process, and not all layers fit. The engine logs one line about the placement.
with LLM("smollm2-135m", memory="450MB", offload="auto", progress=ProgressBar()) as llm:
    [output] = llm.chat(question, params)
    done = llm.statistics()
print(output.text)
print(f"\n{done.steps} passes, {output.figures.tokens_per_step:.2f} tokens per step")
print(f"{done.streamed_bytes / 1e6:.0f} MB streamed, {done.stream_wait_seconds:.1f} s waited for them")
