"""EngineConfig: the frozen options of an engine, in parts for speculation, cache and scheduler."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, Final, Literal, Self

from specinfer.errors import ConfigError
from specinfer.option import Option, check_options, option, options_of, parse_address, parse_size
from specinfer.scheduler_config import CacheConfig, SchedulerConfig
from specinfer.speculation_config import (
    MAX_DEPTH_STREAMED,
    Quantization,
    QuantizationOption,
    SpeculationConfig,
)
from specinfer.support import Feature, check_support

Dtype = Literal["auto", "bfloat16", "float32"]
CacheDtype = Literal["auto", "int8"]
KernelChoice = Literal["auto", "native", "torch"]
GenerationConfig = Literal["auto", "none"]
SpecialTokens = Literal["text", "special"]  # how names of special tokens in messages are encoded
Offload = Literal["never", "layers", "auto"]
ModelImpl = Literal["auto", "native", "transformers"]

MAX_PARTS: Final = 256  # parts of a sum
_PARTS: Final = 8  # default parts of a sum that up to as many processes share


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine: its target model, its speculators and its memory.

    The fields are documented in docs/reference.md. Raises ConfigError for a value outside its range and for
    values that contradict each other.
    """

    model: str
    dtype: Dtype = option(
        "auto",
        "Data type of weights that are not quantized.",
        more="`auto`: bfloat16 with native kernels and on GPUs, else float32.",
    )
    kv_cache_dtype: CacheDtype = option(
        "auto",
        "Data type of the target's KV cache: auto, the activations', or int8.",
        more="`int8` has a scale for each row and head. It takes about half of the memory. Over long "
        "texts, passes of one or few rows take less time. The text differs from that of `auto`, and is the "
        "same with and without guesses, alone and in a batch. Caches of drafts stay exact. CPU only.",
    )
    device: str = option(
        "auto",
        "Device that computes: auto, cpu, cuda or cuda:N.",
        more="`auto`: the first GPU, else the CPU.",
        allowed="auto, cpu, cuda, cuda:N",
    )
    quantization: QuantizationOption = option(
        "auto",
        "Quantization of weights; auto: the file's own, else what fits.",
        more="`auto` takes the blocks of a GGUF file. A quantized folder runs in int4, if that has its "
        "numbers, else in int8. Floats stay in `dtype`, if that takes at most half of the memory or layers "
        "are streamed, else `int8` or `int4` is taken. A line at the start names the choice. `gguf`: the "
        "unchanged blocks of a GGUF file, without rounding again ([checkpoints.md](checkpoints.md)). With "
        "`int4` the output layer is int8.",
    )
    kernels: KernelChoice = option(
        "auto",
        "auto: native kernels on a CPU that supports them, else torch.",
        more="`native`: C++ kernels for this kind of CPU, from the wheel or compiled on first use; `torch`: "
        "the slower PyTorch operators.",
    )
    model_impl: ModelImpl = option(
        "auto",
        "Code that runs a model's layers: native, transformers, or auto.",
        more="`auto`: native if specinfer supports the model's family, else transformers' code with our "
        "attention, matrix products and caches, which needs `pip install 'specinfer[transformers]'` "
        "([models.md](models.md)).",
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code from a model's folder, through transformers.",
        more="Such code runs with all of your permissions.",
    )
    threads: int | None = option(
        None,
        "Threads that compute on the CPU; default: its cores.",
        more="The default respects cgroup quotas and `OMP_NUM_THREADS`. PyTorch uses one thread in a step "
        "whose attention is all native, and its own setting otherwise.",
        shown="physical cores, divided among the processes",
        minimum=1,
    )
    tensor_parallel: int = option(
        1,
        "Processes that divide each layer of the target.",
        more="The text does not depend on their number. CPU only; draft models are divided, too; heads and "
        "lookups run in the first process ([distributed.md](distributed.md)).",
        minimum=1,
    )
    pipeline_parallel: int = option(
        1,
        "Pipeline stages of the target, each with some of the layers.",
        more="Each stage has `tensor_parallel` processes. The text does not depend on the number of stages "
        "([distributed.md](distributed.md)).",
        minimum=1,
    )
    master: str | None = option(
        None,
        "HOST:PORT of this host, to which processes of other hosts connect.",
        more="Each of them runs `specinfer follow` ([distributed.md](distributed.md)).",
        shown="all processes run on this host",
        allowed="HOST:PORT, or None",
    )
    key_file: str | None = option(
        None,
        "File with the key that the engine and its followers share.",
        more="16 bytes or more, in a file that no other user can read.",
        shown="none",
        allowed="the path of a file, or None",
    )
    local_ranks: int | None = option(
        None,
        "With --master: number of processes that this host starts.",
        shown="one, or the first stage",
        minimum=1,
    )
    sum_parts: int | None = option(
        None,
        "Parts in which sums of float and int4 products are added.",
        more="Engines with the same number of parts write the same text, however many processes they have. "
        "tensor_parallel may not exceed it. Sums of int8 products are exact and do not depend on it.",
        shown="1, with tensor_parallel 8 or more",
        minimum=1,
    )
    lora: tuple[str, ...] = option(
        (),
        "NAME=FOLDER of a LoRA adapter saved by PEFT.",
        more="A server and `LLM` take several: requests select one by name, and requests with different "
        "adapters and with none run in the same steps. `generate`, `chat`, `bench` and `check` take one, "
        "which all of their requests use ([lora.md](lora.md)).",
    )
    max_loras: int = option(
        8,
        "Maximum LoRA adapters in memory.",
        more="A request for another adapter loads it in place of the least recently used one.",
        minimum=1,
    )
    chat_template: str | None = option(
        None,
        "File with a chat template, or name of one of the model's, like rag.",
        shown="the model's own",
        allowed="the path of a file, or None",
    )
    generation_config: GenerationConfig = option(
        "auto",
        "Default sampling parameters: auto, the model's recommendation, or none, specinfer's own.",
        more="The recommendation is temperature, top_k, top_p, min_p and repetition_penalty of "
        "generation_config.json, or of a GGUF file's `general.sampling.*`. A server uses it for parameters "
        "that a request leaves out, the command line for options that are not given, and `LLM` for calls "
        "without `SamplingParams` (`LLM.default_params`). `none`: temperature 0.8 and top_p 0.95, as for a "
        "model without a recommendation ([sampling.md](sampling.md)).",
    )
    memory: int | None = option(
        None,
        "Maximum memory of the whole process, like 8GB.",
        more="This includes weights, KV caches and the interpreter.",
        shown="the free memory of the machine and its cgroup",
        minimum=1,
        size=True,
    )
    offload: Offload = option(
        "never",
        "auto: stream layers that do not fit into memory from the disk.",
        more="The target itself in 4 bits is then the draft, if this pays and no draft is named "
        "([offloading.md](offloading.md)). `layers`: the same without this draft. Native kernels on a CPU "
        "only. `never`: refuse a model that does not fit.",
    )
    offload_folder: str | None = option(
        None,
        "Folder for the file from which layers are streamed; use a fast disk.",
        more="The file is as large as the model's weights and is written once.",
        shown="the user's cache",
        allowed="the path of a folder, or None",
    )
    prepared: bool = option(
        True,
        "Keep matrices that were quantized to int8 or int4 in the cache, for the next start.",
        more="Without it nothing is written, and each start quantizes them again. A GGUF file in its own "
        "blocks needs no such file. Streamed layers (`offload`) are read from it.",
    )
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model is {self.model!r}; allowed: a folder, a GGUF file, a hub id or a catalogue name"
            )
        for name in ("chat_template", "offload_folder", "key_file"):
            if isinstance(path := getattr(self, name), PathLike):
                object.__setattr__(self, name, fspath(path))
        if isinstance(self.lora, Mapping):
            object.__setattr__(self, "lora", tuple(f"{name}={path}" for name, path in self.lora.items()))
        elif isinstance(self.lora, list):
            object.__setattr__(self, "lora", tuple(self.lora))
        check_options(self)
        if self.chat_template == "":
            raise ConfigError("chat_template is ''; allowed: the path of a file, or None")
        if (self.sum_parts or 1) > MAX_PARTS:
            raise ConfigError(f"sum_parts is {self.sum_parts}; allowed: 1 to {MAX_PARTS}")
        for name in self.adapters:
            if name == self.model:
                raise ConfigError(f"lora has the name {name!r}, which is the model's; give it another name")
        self._check_hosts()
        if self.quantization != "int8" and self.parts_of_sums < self.tensor_parallel:
            raise ConfigError(
                f"sum_parts is {self.parts_of_sums} with tensor_parallel {self.tensor_parallel} and "
                f"quantization {self.quantization!r}; allowed there: {self.tensor_parallel} or more, as each "
                "process adds a part of every sum"
            )
        check_support(self.features | ({Feature.LORA: self.lora} if self.lora else {}))

    @property
    def adapters(self) -> dict[str, str]:
        """Adapter folders by name; raises ConfigError for a repeated name or a text without NAME=FOLDER."""
        found: dict[str, str] = {}
        for given in self.lora:
            name, sign, folder = given.partition("=")
            if not (name and sign and folder):
                raise ConfigError(f"lora is {given!r}; allowed: NAME=FOLDER")
            if name in found:
                raise ConfigError(f"lora has the name {name!r} twice; give each adapter its own name")
            found[name] = folder
        return found

    @property
    def features(self) -> dict[Feature, object]:
        """The features of these options, with their values; without adapters, as requests may name more."""
        speculation = self.speculation
        sizes = {"tensor_parallel": self.tensor_parallel, "pipeline_parallel": self.pipeline_parallel}
        ranks = " and ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        kind, of_drafts = self.quantization, speculation.draft_quantization
        given: list[tuple[Feature, bool, object]] = [
            (Feature.RANKS, self.ranks > 1, ranks),
            (Feature.TENSOR, self.tensor_parallel > 1, self.tensor_parallel),
            (Feature.PIPELINE, self.pipeline_parallel > 1, self.pipeline_parallel),
            (Feature.SUM_PARTS, (self.sum_parts or 1) > 1, self.sum_parts),
            (Feature.QUANTIZED, kind not in ("auto", "none"), kind),
            (Feature.GGUF, kind == "gguf", kind),
            (Feature.INT8_CACHE, self.kv_cache_dtype != "auto", self.kv_cache_dtype),
            (Feature.MEMORY, self.memory is not None, self.memory),
            (Feature.STORE, self.cache.prompt_store is not None, self.cache.prompt_store),
            (Feature.OFFLOAD, self.offload != "never", self.offload),
            (Feature.NOT_PREPARED, not self.prepared, self.prepared),
            (Feature.DRAFT_QUANTIZED, of_drafts not in ("auto", "none"), of_drafts),
            (Feature.DRAFT_GGUF, of_drafts == "gguf", of_drafts),
        ]
        return {feature: value for feature, used, value in given if used}

    @property
    def kind(self) -> Quantization:
        """The target's quantization, once `load_models` has chosen it."""
        assert self.quantization != "auto", "quantization is not chosen yet"
        return self.quantization

    @property
    def ranks(self) -> int:
        """Number of processes that run the target."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_here(self) -> int:
        """Ranks of this host: all; with `master` the `local_ranks`, else the first stage or one rank."""
        if self.master is None:
            return self.ranks
        return self.local_ranks or (self.tensor_parallel if self.pipeline_parallel > 1 else 1)

    def _check_hosts(self) -> None:
        """Raise ConfigError for options that contradict the number of hosts."""
        if self.master is None:
            for name, value in (("key_file", self.key_file), ("local_ranks", self.local_ranks)):
                if value is not None:
                    raise ConfigError(f"{name} is {value!r} without master; set master, or leave {name} out")
            return
        parse_address("master", self.master)
        if self.key_file is None:
            raise ConfigError(f"master is {self.master!r} without key_file; set key_file to the key's path")
        if self.ranks_here >= self.ranks:
            raise ConfigError(
                f"master is {self.master!r}, but all {self.ranks} ranks run on this host; "
                "raise tensor_parallel or pipeline_parallel, lower local_ranks, or leave master out"
            )

    @property
    def parts_of_sums(self) -> int:
        """Number of parts of the target's float sums (kernels/parts.py); 1 for int8, whose sums are exact."""
        if self.quantization == "int8":
            return 1
        return self.sum_parts or (1 if self.tensor_parallel == 1 else max(_PARTS, self.tensor_parallel))

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, Any]) -> Self:
        """Return an EngineConfig from flat options, as for `LLM(...)`; raises as `with_options` does."""
        return cls(model=model).with_options(options)

    @property
    def streamed(self) -> Self:
        """This config with the defaults for streamed layers: deeper guesses, and limits set by costs."""
        speculation, scheduler = self.speculation, self.scheduler
        defaults: dict[str, Any] = {
            "max_nodes": "auto",
            "lookup_depth": MAX_DEPTH_STREAMED,
            "lookup_nodes": 128,
        }
        speculation = replace(
            speculation,
            **{name: value for name, value in defaults.items() if getattr(speculation, name) is None},
        )
        if scheduler.max_step_tokens is None:
            scheduler = replace(scheduler, max_step_tokens="auto")
        return replace(self, speculation=speculation, scheduler=scheduler)

    @property
    def single_process(self) -> Self:
        """This config in one process with the same number of sum parts."""
        hosts: dict[str, Any] = {"master": None, "key_file": None, "local_ranks": None}
        return replace(self, tensor_parallel=1, pipeline_parallel=1, sum_parts=self.parts_of_sums, **hosts)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return this config with flat options changed: fields of this class and of its three parts.

        Raises ConfigError for an unknown option, with the nearest known name, and for a wrong value.
        """
        top: dict[str, Any] = {}
        of_parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        for name, value in options.items():
            if name not in ENGINE_OPTIONS:
                near = difflib.get_close_matches(name, ENGINE_OPTIONS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(ENGINE_OPTIONS))}"
                raise ConfigError(f"unknown option {name!r}; {hint}")
            part, known = ENGINE_OPTIONS[name]
            if known.about.size and isinstance(value, str):
                value = parse_size(name, value)
            (top if part is None else of_parts[part])[known.attribute] = value
        changed = {part: replace(getattr(self, part), **values) for part, values in of_parts.items()}
        return replace(self, **top, **changed)


PARTS = {"speculation": SpeculationConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
# Options of an engine by name, each with the config part that has it; None is the config itself.
ENGINE_OPTIONS: dict[str, tuple[str | None, Option]] = {
    one.name: (part, one) for part, kind in ((None, EngineConfig), *PARTS.items()) for one in options_of(kind)
}
