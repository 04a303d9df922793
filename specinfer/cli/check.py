"""`specinfer check`: tests on the user's own models that speculation does not change the output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from specinfer.cli.options import FILE, Command, adapter_option, build_llm, model_options, speculation_options
from specinfer.errors import ConfigError, RequestError


@click.command(cls=Command)
@click.option(
    "--suite",
    type=click.Choice(("promise", "parameters")),
    default="promise",
    help="promise: equal texts and equal laws; parameters: equal texts under each sampling parameter.",
)
@click.option("--prompts", "num_prompts", type=click.IntRange(1), default=8, help="Texts of each kind.")
@click.option("--max-tokens", type=int, default=48, help="Length of each text.")
@click.option(
    "--samples", type=click.IntRange(1), show_default="48", help="Sampled texts for each test of a law."
)
@click.option("--batch-size", type=click.IntRange(1), default=8, help="Requests in a batch.")
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write verdicts and figures to a file.")
@model_options
@adapter_option
@speculation_options
def check(
    suite: str,
    num_prompts: int,
    max_tokens: int,
    samples: int | None,
    batch_size: int,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Test on your own models that speculation does not change the output.

    The suite `promise` compares texts with and without speculation, alone and in a batch, repeated, greedy
    and seeded: on a CPU they must be identical, elsewhere equal up to rounding. Then it counts the tokens of
    many sampled texts against the target's own law, with both verifiers, and checks the engine's bookkeeping.
    It takes a few minutes with a small model. The suite `parameters` compares seeded texts under penalties,
    biases, forbidden words, forms and others. Without --draft the speculator is prompt lookup. A step or a
    speculator that fails on the way fails the check, too.

    Exit status 0: every check passed.
    """
    if samples is not None and suite != "promise":
        raise ConfigError(f"--samples is for the suite promise, not for {suite}; leave it out")
    minimum, reason = (3, "as trees come later") if suite == "promise" else (40, "as min_tokens asks for 40")
    if max_tokens < minimum:
        raise ConfigError(f"--max-tokens is {max_tokens}; allowed: an integer >= {minimum}, {reason}")
    from specinfer.files import check_writable, write_json
    from specinfer.report.dataset import built_in

    if json_file is not None:
        check_writable(json_file)
    conversations = built_in().conversations
    if num_prompts > len(conversations):
        raise RequestError(f"--prompts is {num_prompts}; there are {len(conversations)}: ask for fewer")
    llm = build_llm(options, max_batch_size=batch_size)
    if not llm.config.speculation.enabled:
        raise ConfigError("speculation is off, so there is nothing to check; add --draft or --lookup")

    from specinfer.check.parameters import check_parameters
    from specinfer.check.promise import Effort, check_promise
    from specinfer.progress import ProgressBar
    from specinfer.tokenizer import ChatEncoder

    tokenizer, chat = llm.tokenizer, ChatEncoder(llm.tokenizer)
    # Spread over the built-in set, which is ordered by kind.
    chosen = [conversations[i * len(conversations) // num_prompts].turns[0] for i in range(num_prompts)]
    prompts = [
        chat.token_ids([{"role": "user", "content": text}])
        if tokenizer.has_chat_template
        else tokenizer.encode(text)
        for text in chosen
    ]
    verdicts = []
    checked = check_promise if suite == "promise" else check_parameters
    effort = Effort(max_tokens) if samples is None else Effort(max_tokens, samples)
    for verdict in checked(llm, prompts, effort, ProgressBar()):
        verdicts.append(verdict)
        click.echo(str(verdict))
    failed = sum(verdict.decided and not verdict.passed for verdict in verdicts)
    undecided = sum(not verdict.decided for verdict in verdicts)
    if json_file is not None:
        from specinfer.report.provenance import provenance

        write_json(
            json_file,
            {
                **provenance(llm.config.threads),
                "suite": suite,
                "model": llm.config.model,
                "quantization": llm.config.quantization,
                "drafts": list(llm.config.speculation.drafts),
                "lora": list(llm.config.adapters),
                "memory_plan": None if (plan := llm.models.plan) is None else str(plan),
                "passed": not failed and not undecided,
                "verdicts": [verdict.to_json() for verdict in verdicts],
            },
        )
    if failed:
        click.echo(
            f"\nFAILED: {failed} of {len(verdicts)} checks; "
            "the output is not the target's alone, or steps failed on the way"
        )
        sys.exit(1)
    if undecided:
        click.echo(
            f"\nopen: {undecided} of {len(verdicts)} checks saw too little to say; each names what to change"
        )
        sys.exit(1)
    click.echo(f"\npassed: all {len(verdicts)} checks; the output is the target's")


# Both verifiers are tested, so there is none to choose.
check.params = [parameter for parameter in check.params if parameter.name != "verifier"]
