"""Run a data set through one LLM per actor on a cluster with Ray Data (pip install 'ray[data]').

Each actor has one CPU. `specinfer run-batch --replicas N` does the same on one machine without Ray.
"""

from typing import Any

import ray

from specinfer import LLM, SamplingParams

QUESTIONS = ["Name three rivers.", "What is a prime number?", "Who wrote Hamlet?", "Why is the sky blue?"]


class Answers:
    """An actor that loads the model once and answers batches."""

    def __init__(self) -> None:
        self.llm = LLM("smollm2-135m", quantization="int8", threads=1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        talks = [[{"role": "user", "content": question}] for question in batch["item"]]
        outputs = self.llm.chat(talks, SamplingParams(temperature=0, max_tokens=32))
        return {"question": batch["item"], "answer": [output.text for output in outputs]}


if __name__ == "__main__":
    questions = ray.data.from_items(QUESTIONS)
    answers = questions.map_batches(
        Answers, batch_size=2, num_cpus=1, compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2)
    )
    for row in answers.iter_rows():
        print(f"{row['question']}\n    {row['answer']}")
