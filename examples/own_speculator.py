"""Write a speculator: it proposes that the text repeats with a fixed period."""

from specinfer import LLM, SamplingParams, TokenTree
from specinfer.speculators import Speculator, StepPlan, TreeBuilder


class Echo(Speculator):
    """Proposes the tokens from `period` positions earlier."""

    name = "echo"

    def __init__(self, period: int) -> None:
        self.period = period

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        trees = []
        for entry in plan.tree_entries:
            text = list(entry.token_ids[: entry.end])
            builder, node = TreeBuilder(text[-1], entry.max_nodes), 0
            for token in text[-self.period :][: entry.max_depth]:
                node = builder.add(node, token, self.name)
                if node is None:
                    break
            trees.append(builder.build())
        return trees


# Without lookups, which would propose the same tokens. "red green blue, " has four. A fixed size shows the
# guesses of every step; by default the engine leaves out guesses that save no time on this machine.
llm = LLM("smollm2-135m", speculators=[Echo(period=4)], lookup=False, tree_size="fixed", max_nodes=8)
prompt = "red green blue, " * 8 + "red"
[output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=48))
print(output.text, output.figures.accepted_by, f"{output.figures.tokens_per_step:.2f} tokens per step")
