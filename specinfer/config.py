"""EngineConfig: every option of the engine, composed, frozen, passed down, never mutated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, Final, Literal

from specinfer.errors import ConfigError
from specinfer.option import Option, check_options, option, options_of, parse_address, parse_size
from specinfer.speculation_config import DEEPEST_STREAMED, MOST_ROWS, Quantization, SpeculationConfig

Dtype = Literal["auto", "bfloat16", "float32"]
KernelChoice = Literal["auto", "native", "torch"]
GenerationConfig = Literal["auto", "none"]
SpecialTokens = Literal["text", "special"]  # what their names are where users write them
Offload = Literal["never", "layers", "auto"]
ModelImpl = Literal["auto", "native", "transformers"]

MOST_PARTS: Final = 256  # of a sum
_PARTS: Final = 8  # of one that several processes share, unless told otherwise

GONE_OPTIONS: Final = {  # options, and why nobody needs them
    "ngram_max": "longer matches are always looked for first",
    "ngram_branches": "guesses are trees, of at most lookup_nodes nodes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The block-managed KV cache."""

    block_size: int = option(16, "Cache positions of a block.", least=1)
    memory: int | None = option(
        None,
        "For all KV caches, like 2GB.",
        shown="half of what is free (cgroup limits count)",
        name="kv_cache_memory",
        least=1,
        size=True,
    )
    prefix_reuse: bool = option(
        True, "Whether requests that begin alike share blocks.", more="Those with the same `cache_salt` do."
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The request scheduler."""

    max_batch_size: int = option(16, "Requests that run in one step.", least=1)
    max_step_tokens: int | Literal["auto"] | None = option(
        None,
        "Rows of one pass, of prompts and trees together, or auto.",
        more="`auto`: as many as a pass has before it takes twice as long as with one row, 128 to 2048: a "
        "prompt is read in as few passes as pay, and others do not wait longer than that.",
        shown="512, of a server 128; auto where layers are streamed",
        least=1,
    )
    max_context: int | None = option(
        None, "Prompt and output tokens at most.", shown="the model's own", least=2
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.most_step_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_step_tokens is {self.most_step_tokens}, less than max_batch_size "
                f"({self.max_batch_size}); every running request needs at least one row: raise it"
            )

    @property
    def most_step_tokens(self) -> int:
        """The rows of a pass, at most."""
        rows = 512 if self.max_step_tokens is None else self.max_step_tokens
        return max(MOST_ROWS, self.max_batch_size) if rows == "auto" else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: its target, its speculators, its memory."""

    model: str
    dtype: Dtype = option(
        "auto",
        "Of weights that are not quantized.",
        more="`auto`: bfloat16 with native kernels and on GPUs, else float32.",
    )
    device: str = option(
        "auto",
        "auto, cpu, cuda or cuda:N.",
        more="`auto`: the first GPU, else the CPU.",
        allowed="auto, cpu, cuda, cuda:N",
    )
    quantization: Quantization = option(
        "none",
        "How matrices are kept, on a CPU.",
        more="The output layer stays int8 where others are int4. `gguf`: the blocks of a GGUF file as they "
        "are, with nothing rounded ([checkpoints.md](checkpoints.md)).",
    )
    kernels: KernelChoice = option(
        "auto",
        "auto: native ones on a CPU where they can be had.",
        more="`native`: for this kind of CPU, from the wheel or compiled on first use; `torch`: their slow "
        "PyTorch twins.",
    )
    model_impl: ModelImpl = option(
        "auto",
        "Whose code runs the layers of a folder: native, transformers, or auto.",
        more="`auto`: native where there is such a family, else transformers' own code over our attention, "
        "products and caches, with `pip install 'specinfer[transformers]'` ([models.md](models.md)).",
    )
    trust_remote_code: bool = option(
        False,
        "Whether code that a model's folder brings may run, through transformers.",
        more="It can do whatever you can.",
    )
    threads: int | None = option(
        None,
        "That compute on the CPU; default: its cores.",
        more="Cgroup quotas count, `OMP_NUM_THREADS` bounds them. PyTorch computes with one in a step whose "
        "attention is all native, and as the program has set it elsewhere.",
        shown="physical cores, shared out among processes",
        least=1,
    )
    tensor_parallel: int = option(
        1,
        "Processes that share each layer of the target.",
        more="The text is the same for every number of them. On a CPU; drafts are shared, too, "
        "heads and lookups stay in the first process ([distributed.md](distributed.md)).",
        least=1,
    )
    pipeline_parallel: int = option(
        1,
        "Stages of the target, in processes of their own: each has some of the layers.",
        more="Each has as many processes as `tensor_parallel` says. The text is the same for every number of "
        "them ([distributed.md](distributed.md)).",
        least=1,
    )
    master: str | None = option(
        None,
        "HOST:PORT here, at which processes of other hosts come in.",
        more="Each of them is `specinfer follow` ([distributed.md](distributed.md)).",
        shown="all processes are of this host",
        allowed="HOST:PORT, or None",
    )
    key_file: str | None = option(
        None,
        "A file with the key that the engine and its followers share.",
        more="16 bytes or more that nobody else can read.",
        shown="none",
        allowed="the path of a file, or None",
    )
    local_ranks: int | None = option(
        None,
        "With --master: how many of the processes this host starts.",
        shown="one, or the first stage",
        least=1,
    )
    sum_parts: int | None = option(
        None,
        "Parts in which sums of float and int4 products are added.",
        more="Texts are the same on every number of processes that have the same number of parts. "
        "tensor_parallel may not exceed it. int8 sums are exact, and their texts the same whatever "
        "this says.",
        shown="1, with tensor_parallel 8",
        least=1,
    )
    lora: tuple[str, ...] = option(
        (),
        "NAME=FOLDER: a low-rank adapter that PEFT has saved, which requests name.",
        more="May be given several times. Requests with any of them and with none share the steps "
        "([lora.md](lora.md)).",
    )
    max_loras: int = option(
        8,
        "Adapters in memory at once.",
        more="Others are read when a request names them, in place of those that were used the longest time "
        "ago.",
        least=1,
    )
    chat_template: str | None = option(
        None,
        "A file with a chat template in place of the model's own.",
        shown="the model's own",
        allowed="the path of a file, or None",
    )
    generation_config: GenerationConfig = option(
        "auto",
        "auto: sample as the model recommends where a request does not say; none: do not.",
        more="The recommendation is temperature, top_k, top_p, min_p and repetition_penalty of "
        "generation_config.json, or of a GGUF file's `general.sampling.*`. It holds for a server, and for "
        "`LLM` where no `SamplingParams` are given (`LLM.default_params`). `none`: "
        "[SamplingParams](sampling.md)' own.",
    )
    memory: int | None = option(
        None,
        "The most memory that the whole process may take, like 8GB.",
        more="Weights, KV caches, the interpreter.",
        shown="what is free in the machine and its cgroup",
        least=1,
        size=True,
    )
    offload: Offload = option(
        "never",
        "auto: layers that do not fit into memory are streamed from the disk.",
        more="Then the model's own twin in 4 bits guesses where it pays and no draft is named "
        "([offloading.md](offloading.md)); `layers`: the same without a twin. Native kernels on a CPU only. "
        "`never`: such a model is refused.",
    )
    offload_folder: str | None = option(
        None,
        "Folder from which layers are streamed; a fast disk pays.",
        more="The prepared file lies there, as large as the model's weights, and made once.",
        shown="the user's cache",
        allowed="the path of a folder, or None",
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
        if (self.sum_parts or 1) > MOST_PARTS:
            raise ConfigError(f"sum_parts is {self.sum_parts}; allowed: 1 to {MOST_PARTS}")
        for name in self.adapters:
            if name == self.model:
                raise ConfigError(f"lora names an adapter {name!r}, like the model; give it another name")
        self._check_hosts()
        if self.ranks > 1:
            self._check_ranks()

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of adapters by name; raises ConfigError for what is no NAME=FOLDER, or named twice."""
        found: dict[str, str] = {}
        for given in self.lora:
            name, sign, folder = given.partition("=")
            if not (name and sign and folder):
                raise ConfigError(f"lora is {given!r}; allowed: NAME=FOLDER")
            if name in found:
                raise ConfigError(f"lora names {name!r} twice; give each adapter a name of its own")
            found[name] = folder
        return found

    @property
    def ranks(self) -> int:
        """The processes that run the target."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_here(self) -> int:
        """Those of this host: all of them, or with a master the first stage, or one of a single stage."""
        if self.master is None:
            return self.ranks
        return self.local_ranks or (self.tensor_parallel if self.pipeline_parallel > 1 else 1)

    def _check_hosts(self) -> None:
        """Raise ConfigError for what does not go with one host, or with several."""
        if self.master is None:
            for name, value in (("key_file", self.key_file), ("local_ranks", self.local_ranks)):
                if value is not None:
                    raise ConfigError(f"{name} is {value!r} without master; name it, or leave {name} out")
            return
        parse_address("master", self.master)
        if self.key_file is None:
            raise ConfigError(f"master is {self.master!r} without key_file; name the file with the key")
        if self.ranks_here >= self.ranks:
            raise ConfigError(
                f"master is {self.master!r}, and this host has {self.ranks_here} of {self.ranks} "
                "ranks; some must be of other hosts: name more ranks, or leave master out"
            )

    def _check_ranks(self) -> None:
        """Raise ConfigError for what does not go with several ranks."""
        sizes = {"tensor_parallel": self.tensor_parallel, "pipeline_parallel": self.pipeline_parallel}
        told = "with " + " and ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        if self.quantization != "int8" and self.parts_of_sums < self.tensor_parallel:
            raise ConfigError(
                f"sum_parts is {self.parts_of_sums} {told} and quantization {self.quantization!r}; allowed "
                f"there: {self.tensor_parallel} or more, as each process has a part of every sum"
            )
        kinds = {
            "quantization": self.quantization,
            "draft_quantization": self.speculation.draft_quantization,
        }
        for name, kind in kinds.items():
            if kind == "gguf" and self.tensor_parallel > 1:
                raise ConfigError(
                    f"{name} is 'gguf' {told}; allowed there: none, int8, int4, as columns of blocks are not "
                    "dealt out"
                )
        if self.lora:
            raise ConfigError(
                f"lora names adapters {told}; allowed there: none, as no rank has a part of one: leave it "
                "out, or merge them into the model"
            )
        if self.offload != "never":
            raise ConfigError(
                f"offload is {self.offload!r} {told}; allowed there: never, as ranks keep their weights"
            )
        if self.memory is not None:
            raise ConfigError(
                f"memory is {self.memory} {told}; it bounds one process: leave it out, or set kv_cache_memory"
            )

    @property
    def parts_of_sums(self) -> int:
        """How many parts the target's sums of floats have (kernels/parts.py); 1: none, or sums are exact."""
        if self.quantization == "int8":
            return 1
        return self.sum_parts or (1 if self.tensor_parallel == 1 else _PARTS)

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """An EngineConfig from flat options, as LLM(...) and the command line have them.

        Raises ConfigError as `with_options` does.
        """
        return cls(model=model).with_options(options)

    @property
    def streamed(self) -> EngineConfig:
        """The same where layers are streamed: unless told otherwise, guesses are deeper, and costs say how
        large trees and steps are.
        """
        speculation, scheduler = self.speculation, self.scheduler
        usual: dict[str, Any] = {
            "max_nodes": "auto",
            "lookup_depth": DEEPEST_STREAMED,
            "lookup_nodes": 128,
            "prediction_depth": DEEPEST_STREAMED,
            "forced_depth": DEEPEST_STREAMED,
        }
        asked = {name for name in usual if getattr(speculation, name) is not None}
        speculation = replace(
            speculation, **{name: value for name, value in usual.items() if name not in asked}
        )
        if scheduler.max_step_tokens is None:
            scheduler = replace(scheduler, max_step_tokens="auto")
        return replace(self, speculation=speculation, scheduler=scheduler)

    @property
    def alone(self) -> EngineConfig:
        """The same in one process, which adds sums of floats as these do."""
        hosts: dict[str, Any] = {"master": None, "key_file": None, "local_ranks": None}
        return replace(self, tensor_parallel=1, pipeline_parallel=1, sum_parts=self.parts_of_sums, **hosts)

    def with_options(self, options: Mapping[str, Any]) -> EngineConfig:
        """The same but for these flat options: fields of this class and of its three parts.

        Old names are taken (`new_names`). Raises ConfigError on an unknown option, naming the nearest known
        one, and on a wrong value.
        """
        options = new_names(options)
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
# All options of an engine by name, each with the part of the config that has it; None: the config itself.
ENGINE_OPTIONS: dict[str, tuple[str | None, Option]] = {
    one.name: (part, one) for part, kind in ((None, EngineConfig), *PARTS.items()) for one in options_of(kind)
}
OLD_OPTIONS: Final = {old: one.name for _, one in ENGINE_OPTIONS.values() for old in one.about.old}


def new_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names they have now; raises ConfigError for one that is gone or given twice.

    `ngram` and `suffix` switch the same speculator on: it is on where one of the two is.
    """
    renamed: dict[str, Any] = {}
    for old, value in options.items():
        if old in GONE_OPTIONS:
            raise ConfigError(f"{old} is no option any more: {GONE_OPTIONS[old]}; leave it out")
        name = OLD_OPTIONS.get(old, old)
        if name == "lookup":
            value = renamed.get(name) or value
        elif renamed.get(name, value) != value:
            raise ConfigError(f"{name} is {renamed[name]!r} and {value!r}, once by an old name; give it once")
        renamed[name] = value
    return renamed
