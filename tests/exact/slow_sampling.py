"""Slow oracle of every sampling parameter: the law of the next token after a prompt and an output.

It applies the rules of docs/sampling.md one after the other to lists and dictionaries, without trees, caches,
speculation or specinfer/processors. Logits are float32, so every sum, product and quotient of them is rounded
to float32 (`single`); probabilities are Python floats.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from specinfer.sampling_params import SamplingParams
from tests.oracles import verification

from .oracles import processed_law


@dataclass(frozen=True)
class Rules:
    """A request's parameters in the token ids of one model."""

    params: SamplingParams
    prompt: tuple[int, ...]
    ending: tuple[int, ...] = ()  # end-of-text and stop tokens
    bad_words: tuple[tuple[int, ...], ...] = ()
    form: Callable[[tuple[int, ...]], set[int]] | None = None  # output -> token ids that may follow
    thinking: Callable[[tuple[int, ...]], int | None] | None = None  # output -> the only token to follow
    names: tuple[str, ...] = ()  # texts of the tokens; those of special ones begin with "<"


def single(x):
    """Round x to float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def excluded_by(rules, output, token):
    """Return the parameter that excludes `token` after `output`; None if it is possible."""
    if rules.form is not None and token not in rules.form(tuple(output)):
        return "structured output"
    forced = None if rules.thinking is None else rules.thinking(tuple(output))
    if forced not in (None, token):
        return "thinking"
    allowed = rules.params.allowed_token_ids
    if allowed is not None and token not in allowed:
        return "allowed_token_ids"
    for word in rules.bad_words:
        if [*output, token][-len(word) :] == list(word):
            return "bad_words"
    if len(output) < rules.params.min_tokens and token in rules.ending:
        return "min_tokens"
    return None


def processed_logits(logits, rules, output):
    """Return the logits after all rules that precede temperature, [vocab]."""
    params, output = rules.params, list(output)
    processed = []
    for token, x in enumerate(logits):
        x = float(x)
        if excluded_by(rules, output, token) is not None:
            x = -math.inf
        if params.logit_bias is not None and token in params.logit_bias:
            x = single(x + single(params.logit_bias[token]))
        if token in rules.prompt or token in output:
            factor = single(params.repetition_penalty)
            x = single(x / factor) if x > 0 else single(x * factor)
        x = single(x - single(single(params.frequency_penalty) * output.count(token)))
        if token in output:
            x = single(x - single(params.presence_penalty))
        processed.append(x)
    return processed


def is_dead_end(rules, output, vocab):
    """Return whether the parameters exclude every token after `output`."""
    return all(excluded_by(rules, output, token) is not None for token in range(vocab))


def next_law(logits, rules, output):
    """Return the law of the token after `output`, a list of floats, [vocab]; one token must be possible."""
    return processed_law(processed_logits(logits, rules, output), rules.params)


def is_finished(rules, output):
    """Return whether the text ends with `output` for a reason other than its length."""
    if not output or len(output) < rules.params.min_tokens:
        return False
    return output[-1] in rules.ending or any(is_stop(rules, output, one) for one in rules.params.stop)


def is_stop(rules, output, stop):
    """Return whether the string ends in the last token, in the text without or with special tokens' names."""
    names = [rules.names[token] for token in output]
    for shown in (names, [name for name in names if name[0] != "<"]):
        text = "".join(shown)
        if shown and shown[-1] == names[-1] and stop in text[-len(names[-1]) - len(stop) + 1 :]:
            return True
    return False


def text_law(logits_of, rules, length):
    """Return the law of texts of up to `length` tokens: a dict text -> probability.

    `logits_of(output)` returns the target's logits after prompt and output. A dead end is a text that ends in
    None.
    """
    texts, finished = {(): 1.0}, {}
    while texts:
        longer = {}
        for text, probability in texts.items():
            if is_finished(rules, text) or len(text) == length:
                finished[text] = probability
            elif is_dead_end(rules, text, len(logits_of(text))):
                finished[(*text, None)] = probability
            else:
                law = next_law(logits_of(text), rules, text)
                longer |= {(*text, token): probability * p for token, p in enumerate(law) if p > 0}
        texts = longer
    return finished


def seeded_text(logits_of, rules, seed, length):
    """Return the text of a seed: each token is the argmax of log p + noise over the whole vocabulary."""
    output = ()
    while len(output) < length and not is_finished(rules, output):
        logits = logits_of(output)
        if is_dead_end(rules, output, len(logits)):
            return (*output, None)
        law = next_law(logits, rules, output)
        output += (verification.coupled_choice(law, seed, len(rules.prompt) + len(output)),)
    return output


def logprobs(logits):
    """Return the log softmax of a row, [vocab]."""
    values = [float(x) for x in logits]
    top = max(values)
    total = math.log(math.fsum(math.exp(x - top) for x in values))
    return [x - top - total for x in values]
