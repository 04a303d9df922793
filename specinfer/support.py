"""Support: the pairs of features that do not work together, each with the sentence that refuses it.

Every stage that learns of a feature calls `check_support` with those so far: the config, the hardware, the
target, each draft, the plan of memory. A pair that is not in the table works.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from specinfer.errors import ConfigError


class Feature(StrEnum):
    """A feature of an engine; the value is its name in docs/which_options.md."""

    GPU = "a GPU"
    TORCH = "PyTorch's kernels"
    RANKS = "several processes"
    TENSOR = "`tensor_parallel`"
    PIPELINE = "`pipeline_parallel`"
    SUM_PARTS = "`sum_parts`"
    QUANTIZED = "`int8`, `int4` or `gguf` weights"
    GGUF = "`gguf` weights"
    INT8_CACHE = "`kv_cache_dtype` int8"
    FEW_BITS = "weights of as few bits as `self`"
    HOSTED = "a model through transformers"
    LORA = "`lora`"
    MEMORY = "`memory`"
    STORE = "`prompt_store`"
    OFFLOAD = "`offload`"
    STREAMED = "layers that `offload` streams"
    NOT_PREPARED = "`prepared` off"
    SELF_DRAFT = "the draft `self`"
    HEAD = "a head as draft"
    ASSISTANT = "an assistant of Gemma 4"
    MTP = "an MTP head"
    HOSTED_DRAFT = "a draft through transformers"
    DRAFT_QUANTIZED = "an `int8`, `int4` or `gguf` draft"
    DRAFT_GGUF = "a `gguf` draft"
    DRAFT_LORA = "`draft_lora`"
    RECURRENT_DRAFT = "a draft with recurrent layers"
    OTHER_TOKENS = "a draft with another tokenizer"
    SHARED = "Gemma 3n, 4 E2B or 4 E4B"
    STREAMS = "Gemma 3n"


# Ends of sentences that several pairs have. {0} and {1} are the values of a pair's features.
_BLOCKS: Final = (
    "is 'gguf' with tensor_parallel {1}; allowed there: none, int8, int4, as GGUF blocks cannot be divided "
    "by columns"
)
_PRODUCTS: Final = "quantized products run on the CPU only: use device cpu, or"
_WHOLE: Final = "runs through transformers, whose layers can be neither divided nor streamed; allowed there:"
_NATIVE_SUMS: Final = "with PyTorch's kernels ({1}), which do not divide sums; allowed there: 1"
_SPREAD: Final = "and {1} cuts gates off by the spread of a row, which ranks do not divide; allowed there: 1"
_NATIVE: Final = "allowed: adapters of models that run natively"
REFUSED: Final[Mapping[tuple[Feature, Feature], str]] = {
    (Feature.NOT_PREPARED, Feature.OFFLOAD): (
        "prepared is False with offload {1!r}, which streams layers from that file; leave one of them out"
    ),
    (Feature.GGUF, Feature.TENSOR): f"quantization {_BLOCKS}",
    (Feature.DRAFT_GGUF, Feature.TENSOR): f"draft_quantization {_BLOCKS}",
    (Feature.LORA, Feature.RANKS): (
        "adapters do not run with {1}, as ranks cannot divide them; leave them out, or merge the adapter "
        "into the model"
    ),
    (Feature.OFFLOAD, Feature.RANKS): (
        "offload is {0!r} with {1}; allowed there: never, as ranks keep weights in memory"
    ),
    (Feature.MEMORY, Feature.RANKS): (
        "memory is {0} with {1}; it limits a single process; leave it out, or set kv_cache_memory"
    ),
    (Feature.STORE, Feature.RANKS): (
        "prompt_store is {0!r} with {1}, where each process has a part of every block; leave it out"
    ),
    (Feature.STORE, Feature.GPU): (
        "prompt_store is {0!r}, which keeps blocks of engines on a CPU, and the device is {1}; leave it out"
    ),
    (
        Feature.QUANTIZED,
        Feature.GPU,
    ): f"quantization is {{0!r}} on device {{1}}; {_PRODUCTS} quantization none",
    (Feature.DRAFT_QUANTIZED, Feature.GPU): (
        f"draft_quantization is {{0!r}} on device {{1}}; {_PRODUCTS} draft_quantization none"
    ),
    (Feature.INT8_CACHE, Feature.GPU): "kv_cache_dtype is {0!r} on device {1}; allowed there: auto",
    (Feature.TENSOR, Feature.GPU): "tensor_parallel is {0} on device {1}; allowed there: 1",
    (Feature.PIPELINE, Feature.GPU): "pipeline_parallel is {0} on device {1}; allowed there: 1",
    (Feature.SUM_PARTS, Feature.GPU): "sum_parts is {0} on device {1}; allowed there: 1",
    (Feature.TENSOR, Feature.TORCH): f"tensor_parallel is {{0}} {_NATIVE_SUMS}",
    (Feature.SUM_PARTS, Feature.TORCH): f"sum_parts is {{0}} {_NATIVE_SUMS}",
    (Feature.TENSOR, Feature.HOSTED): f"tensor_parallel is {{0}}, and {{1}} {_WHOLE} 1",
    (Feature.PIPELINE, Feature.HOSTED): f"pipeline_parallel is {{0}}, and {{1}} {_WHOLE} 1",
    (Feature.SUM_PARTS, Feature.HOSTED): f"sum_parts is {{0}}, and {{1}} {_WHOLE} 1",
    (Feature.OFFLOAD, Feature.HOSTED): f"offload is {{0!r}}, and {{1}} {_WHOLE} 'never'",
    (
        Feature.LORA,
        Feature.HOSTED,
    ): "{1} runs through transformers, without adapters; merge it into the model",
    (Feature.HEAD, Feature.HOSTED): (
        "drafts names {0}, a head, and {1} runs through transformers, where heads cannot read between "
        "layers; name a small model, or leave it out"
    ),
    (Feature.ASSISTANT, Feature.RANKS): (
        "drafts names {0}, an assistant, and with {1} its target's keys lie in other processes; name a small "
        "model, or leave it out"
    ),
    (Feature.MEMORY, Feature.GPU): "memory limits engines on a CPU, and the device is {1}; leave it out",
    (Feature.STREAMED, Feature.TORCH): (
        "offload is {0} does not fit into memory; layers are streamed for native kernels on a CPU, and "
        "this is {1} with PyTorch's: choose a smaller model"
    ),
    (Feature.TENSOR, Feature.STREAMS): f"tensor_parallel is {{0}}, {_SPREAD}",
    (Feature.SUM_PARTS, Feature.STREAMS): f"sum_parts is {{0}}, {_SPREAD}",
    (Feature.PIPELINE, Feature.SHARED): (
        "pipeline_parallel is {0}, and layers of {1} use keys, values or embeddings of other stages; allowed "
        "there: 1"
    ),
    (Feature.HEAD, Feature.STREAMS): (
        "drafts names {0}, a head, and {1} has several residual streams, which heads cannot read; name a "
        "small model, or leave it out"
    ),
    (Feature.MTP, Feature.TENSOR): (
        "the draft {0} uses the target's output layer, which tensor_parallel {1} divides; allowed there: 1, "
        "or an EAGLE or block head"
    ),
    (Feature.SELF_DRAFT, Feature.FEW_BITS): (
        "drafts names 'self', the target itself in {0}, and the target is {1} already; name a smaller model "
        "or a head, or leave it out: lookups guess by themselves"
    ),
    (Feature.DRAFT_LORA, Feature.HEAD): f"draft_lora gives {{1}} an adapter, and it is a head; {_NATIVE}",
    (Feature.DRAFT_LORA, Feature.HOSTED_DRAFT): (
        f"draft_lora gives {{1}} an adapter, and it is a model that runs through transformers; {_NATIVE}"
    ),
    (Feature.RECURRENT_DRAFT, Feature.OTHER_TOKENS): (
        "drafts names {0}, a model with recurrent layers and with other tokens than {1}; such models cannot "
        "take back tokens: name one with the target's tokenizer, or leave it out"
    ),
}


def refusal(features: Mapping[Feature, object]) -> str | None:
    """Return the sentence that refuses these features, given with their values, or None if they work."""
    for (one, other), sentence in REFUSED.items():
        if one in features and other in features:
            return sentence.format(features[one], features[other])
    return None


def check_support(features: Mapping[Feature, object]) -> None:
    """Raise ConfigError if two of the features do not work together."""
    if (sentence := refusal(features)) is not None:
        raise ConfigError(sentence)
