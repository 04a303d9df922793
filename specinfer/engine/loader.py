"""Loader: loads the weights of models, into memory or streamed from prepared files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from specinfer.attention.sdpa import SdpaAttention
from specinfer.config import EngineConfig
from specinfer.engine.drafts import AnyDraft, FoundHead, FoundModel
from specinfer.engine.hardware import Hardware
from specinfer.engine.memory import MemoryPlan, offload_folder
from specinfer.engine.ranks import Ranks
from specinfer.errors import ConfigError, DamagedFileError, ModelError, ModelFileError
from specinfer.heads.checkpoint import AnyHeadModel, load_head
from specinfer.kernels.attention import NativeAttention, unsupported
from specinfer.kernels.choice import Kernels, draft_kernels, streaming_kernels
from specinfer.kernels.machine import release_free_memory
from specinfer.models.adapters.adapter_cache import adapter_dtype
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.draft_memory import DraftMemory
from specinfer.models.language_model import LanguageModel
from specinfer.models.prepared import PreparedFile
from specinfer.models.shard import Shard
from specinfer.models.streamed import layer_records, table_on_disk
from specinfer.models.weight_memory import Shared
from specinfer.models.weight_sizes import table_bytes
from specinfer.models.weights import load_model, load_streamed
from specinfer.parallel.follower import SharedDraft
from specinfer.progress import CheckedProgress, Progress
from specinfer.speculation_config import Quantization
from specinfer.transport.group import Group

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_OUTPUT: Final = "lm_head"  # name of the output layer's record


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads the models of one engine; with a memory plan some of their layers are streamed.

    A damaged prepared file is removed and made again once; DamagedFileError is raised if the new file is
    damaged, too.
    """

    config: EngineConfig
    hardware: Hardware
    plan: MemoryPlan | None  # None: all weights stay in memory
    progress: Progress

    @property
    def folder(self) -> Path | None:
        """The folder for prepared files; None: the user's cache."""
        return None if self.plan is None else offload_folder(self.config)

    def draft_memory(
        self, found: FoundModel, quantization: Quantization, *, output: bool
    ) -> DraftMemory | None:
        """Return the memory of a `self` draft that layers of a streamed target may get, or None.

        `output` is True if the draft has its own output layer.
        """
        if self.plan is None or not self.plan.placement.streamed:
            return None
        plan, target = self.plan, self.plan.prepared
        layers = layer_records(target)
        streamed = [layers[number] for number in plan.placement.streamed]

        def read(prepared: PreparedFile) -> DraftMemory:
            names = layer_records(prepared)
            if output and not plan.drafts.shares_head and _OUTPUT in prepared.records:
                names.append(_OUTPUT)
            return DraftMemory(prepared, names, target, streamed, plan.disk)

        make = partial(self._prepare, found, quantization)
        return _used(make(), read, make)

    def target(
        self,
        found: FoundModel,
        quantization: Quantization,
        *,
        reads_table: bool,
        draft_memory: DraftMemory | None = None,
    ) -> LanguageModel:
        """Load the target; if it is streamed and a head reads its embeddings, these stay in memory.

        Some of its layers may use the `draft_memory`.
        """
        kernels, plan, part = self._fitting(found, quantization), self.plan, None
        if self.config.parts_of_sums > 1:
            part = Shard(0, 1, self.config.parts_of_sums).of(found.model.config)
        if plan is None:
            return self._load(found, kernels, quantization, part=part)

        def stream(prepared: PreparedFile) -> LanguageModel:
            return load_streamed(
                found.model,
                prepared,
                plan.placement,
                plan.disk,
                dtype=self.hardware.dtype,
                kernels=kernels,
                quantization=quantization,
                table_in_memory=reads_table,
                draft_memory=draft_memory,
                progress=self.progress,
                name=found.files.name,
                part=part,
            )

        return _used(plan.prepared, stream, partial(self._prepare, found, quantization))

    def shared_out(
        self, ranks: Ranks, drafts: Mapping[str, tuple[FoundModel, Quantization]]
    ) -> tuple[LanguageModel, dict[str, LanguageModel]]:
        """Load rank 0's parts of a target on several ranks, and of its shared drafts.

        Raises as Ranks.start, Ranks.check_loading and Ranks.join do.
        """
        quantization = ranks.quantization
        kernels = self._fitting(ranks.found, quantization, ranks.size)
        # A file of a single stage's matrices is not written. A GGUF file's blocks need none.
        if ranks.layout.stages > 1 and quantization not in ("none", "gguf") and self.config.prepared:
            with contextlib.suppress(ModelError):  # else they are quantized at each start
                self._prepare(ranks.found, quantization)
        shared = {name: drafts[name] for name in ranks.drafts}
        fitting = {
            name: draft_kernels(self._fitting(found, kind, ranks.layout.width))
            for name, (found, kind) in shared.items()
        }
        shared_drafts = [
            SharedDraft(
                "" if found is ranks.found else str(found.model.path.resolve()), kind, *_how(fitting[name])
            )
            for name, (found, kind) in shared.items()
        ]
        native_attention, nontemporal = _how(kernels)
        ranks.start(
            kernels.library,
            shared_drafts,
            dtype=str(self.hardware.dtype).removeprefix("torch."),
            native=kernels.library is not None,
            native_attention=native_attention,
            nontemporal=nontemporal,
            int8_cache=kernels.int8_cache,
            keep=self.config.prepared,
        )
        loaded: dict[str, LanguageModel] = {}
        loader = replace(self, progress=CheckedProgress(self.progress, ranks.check_loading))
        try:
            model = loader._load(ranks.found, kernels, quantization, part=ranks.parts[0], group=ranks.group)
            for number, (name, (found, kind)) in enumerate(shared.items(), start=1):
                loaded[name] = loader._load(
                    found,
                    fitting[name],
                    kind,
                    shared=Shared(model.table) if found is ranks.found else None,
                    part=ranks.drafts[name][0],
                    group=ranks.group,
                )
                loaded[name].number = number
            ranks.join(model)
        except BaseException:
            ranks.group.close()
            raise
        return model, loaded

    def draft(
        self, found: FoundModel, quantization: Quantization, logit_ids: Sequence[int] | None
    ) -> LanguageModel:
        """Load a draft model with logits for `logit_ids` (None: all).

        With a streamed target the draft's embeddings are read from the disk: from its GGUF file if it runs in
        its own blocks, else from a prepared file.
        """
        kernels = draft_kernels(self._fitting(found, quantization))
        shared: Shared | None = None
        if self.plan is not None and table_bytes(found.model, self.hardware.dtype, quantization) > 0:
            make = partial(self._prepare, found, quantization)
            shared = Shared(_used(make(), table_on_disk, make))
        return self._load(found, kernels, quantization, logit_ids, shared)

    def self_draft(
        self,
        found: FoundModel,
        target: LanguageModel,
        quantization: Quantization,
        logit_ids: Sequence[int] | None,
        draft_memory: DraftMemory | None = None,
    ) -> LanguageModel:
        """Load the `self` draft: the target in fewer bits.

        It shares the target's embeddings, and has an output layer if the memory plan gives it one. It uses
        `draft_memory` before other memory.
        """
        kernels = draft_kernels(self._fitting(found, quantization))
        shares_head = False
        if self.plan is not None:  # written matrix by matrix, with embeddings, as other runs may need them
            self._prepare(found, quantization)
            shares_head = self.plan.drafts.shares_head and logit_ids is None
        elif quantization != "none" and self.config.prepared:
            with contextlib.suppress(ModelError):  # else it is quantized at each start
                self._prepare(found, quantization)
        shared = Shared(target.table, target.output if shares_head else None, draft_memory)
        loaded = self._load(found, kernels, quantization, logit_ids, shared)
        if draft_memory is not None:
            release_free_memory()  # freed by matrices read from the file
        return loaded

    def head(self, found: FoundHead, model: LanguageModel, quantization: Quantization) -> AnyHeadModel:
        """Load a head on the target `model`."""
        assert isinstance(model, Decoder), "heads of others were refused when they were found"
        return load_head(
            found.head,
            model,
            progress=self.progress,
            name=found.files.name,
            kernels=draft_kernels(self._fitting(found, quantization)),
            quantization=quantization,
            keep=self.config.prepared,
        )

    def adapt(self, draft: AnyDraft, adapter: PeftFolder, quantization: Quantization) -> None:
        """Read a draft's own adapter; `quantization` is that of the draft."""
        assert isinstance(draft, LanguageModel), "adapters of heads were refused"
        weights = adapter_dtype(quantization, draft.dtype)
        draft.adapter = adapter.load(weights, self.hardware.device, draft.kernels.products.library)

    def _fitting(self, found: FoundModel | FoundHead, quantization: Quantization, ranks: int = 1) -> Kernels:
        """Return the kernels for a model, by its size; with PyTorch's attention if native cannot run it."""
        weights = found.weight_bytes(self.hardware.dtype, self.hardware.kernels, quantization) // ranks
        kernels = streaming_kernels(self.hardware.kernels, weights)
        name, heads = found.files.name, found.config
        reason = unsupported(heads.head_dim, heads.num_heads // heads.num_kv_heads, self.hardware.dtype)
        if reason is None or not isinstance(kernels.attention, NativeAttention):
            return kernels
        if self.config.kernels == "native":
            raise ConfigError(f"kernels is 'native', whose attention cannot run {name}: {reason}; use auto")
        _LOG.warning("native attention is not used for %s, PyTorch runs instead: %s", name, reason)
        return replace(kernels, attention=SdpaAttention())

    def _prepare(self, found: FoundModel, quantization: Quantization) -> PreparedFile:
        return found.prepare(self.hardware, quantization, self.folder, self.progress)

    def _load(
        self,
        found: FoundModel,
        kernels: Kernels,
        quantization: Quantization,
        logit_ids: Sequence[int] | None = None,
        shared: Shared | None = None,
        part: ModelConfig | None = None,
        group: Group | None = None,
    ) -> LanguageModel:
        return load_model(
            found.model,
            dtype=self.hardware.dtype,
            device=self.hardware.device,
            progress=self.progress,
            name=found.files.name,
            logit_ids=logit_ids,
            kernels=kernels,
            quantization=quantization,
            cache=self.folder,
            keep=self.config.prepared,
            shared=shared,
            part=part,
            group=group,
        )


def _how(kernels: Kernels) -> tuple[bool, bool]:
    """Return whether attention is native, and whether products bypass the CPU caches for weights."""
    return isinstance(kernels.attention, NativeAttention), kernels.products.use.nontemporal


def _used(prepared: PreparedFile, use: Callable[[PreparedFile], _T], make: Callable[[], PreparedFile]) -> _T:
    """Return `use(prepared)`, or `use(make())` if the prepared file is damaged, which is then removed.

    Raises ModelFileError if it cannot be removed.
    """
    try:
        return use(prepared)
    except DamagedFileError as error:
        _LOG.warning("a prepared model is made again: %s", str(error))
        try:
            prepared.path.unlink(missing_ok=True)
        except OSError as failed:
            raise ModelFileError(
                f"{error}; and it cannot be removed ({failed.strerror}): remove it, or name another folder "
                "with --offload-folder"
            ) from failed
    return use(make())  # outside the handler, whose error keeps the loaded weights alive
