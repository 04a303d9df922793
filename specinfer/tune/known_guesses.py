"""What a member of a pool proposes at every place of the answers that are learnt from, on disk.

A file for each shard, so that whoever is killed loses little; it names the member by a hash of its weights,
and is made anew where that is another.

    tokens    int32 [R, W]   of all answers but the held-out ones: the likeliest tokens; -1: none
    member    uint8 [32]

Shapes: R tokens of answers, W tokens proposed at a place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.safetensors import TensorEntry, read_entries, write_safetensors
from specinfer.progress import Progress
from specinfer.tune.blocks import anchors_of, blocks
from specinfer.tune.draft import Draft
from specinfer.tune.shards import Corpus, Shard, TunedText

_DTYPES: Final = {"I32": torch.int32, "U8": torch.uint8}
_ALL: Final = torch.iinfo(torch.int64).max


class KnownGuesses:
    """One member's, by the number of the text among those that are learnt from."""

    def __init__(self, corpus: Corpus, folder: Path, weights: Path) -> None:
        """`folder` is where they are kept, `weights` the member's model.safetensors; raises OSError."""
        self._corpus = corpus
        self._folder = folder
        with weights.open("rb") as file:
            self._member = hashlib.file_digest(file, "sha256").digest()
        self._rows: list[tuple[TensorEntry, int, int]] = []  # where each text's are

    def complete(self, draft: Draft, width: int, progress: Progress, among_S: Tensor | None = None) -> None:
        """Compute what is not there; `draft` is the member, which proposes so many tokens at a place.

        `among_S` are the entries of the draft's ids that are looked at, as others are hardly ever right;
        None: all. Raises OSError.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        shards = self._corpus.shards()
        progress.start(len(shards), "guesses of the pool so far", "shards")
        try:
            for shard in shards:
                texts = [number for number, held_out in enumerate(shard.held_out) if not held_out]
                entry = self._read(shard, texts, width)
                if entry is None and texts:
                    first = len(self._rows)  # texts are numbered as they lie in the shards
                    ours = [self._corpus.text(first + place, held_out=False) for place in range(len(texts))]
                    self._write(shard, [proposed(draft, text, width, among_S) for text in ours])
                    entry = self._read(shard, texts, width)
                start = 0
                for number in texts:
                    assert entry is not None
                    self._rows.append((entry, start, start + shard.answer(number)))
                    start += shard.answer(number)
                progress.advance(1)
        finally:
            progress.finish()

    def of(self, number: int) -> Tensor:
        """What is proposed behind a text's tokens, int64 [R, W]."""
        entry, start, stop = self._rows[number]
        return entry.read_rows(start, stop).long()

    def _path(self, shard: Shard) -> Path:
        return self._folder / shard.path.name

    def _read(self, shard: Shard, texts: Sequence[int], width: int) -> TensorEntry | None:
        """The tokens of a shard's texts; None where they are another member's, damaged, or not there."""
        try:
            entries = read_entries([self._path(shard)], _DTYPES)
            whole = entries["member"].read_rows(0, entries["member"].shape[0])
        except (OSError, ModelFileError, KeyError):
            return None
        rows = sum(shard.answer(number) for number in texts)
        tokens = entries.get("tokens")
        alike = bytes(whole.tolist()) == self._member
        return tokens if alike and tokens is not None and tokens.shape == (rows, width) else None

    def _write(self, shard: Shard, parts: Sequence[Tensor]) -> None:
        tensors = {
            "tokens": torch.cat(list(parts)).to(torch.int32).contiguous(),
            "member": torch.tensor([*self._member], dtype=torch.uint8),
        }
        write_safetensors(self._path(shard), tensors, mode=0o600)


@torch.inference_mode()
def proposed(draft: Draft, text: TunedText, width: int, among_S: Tensor | None = None) -> Tensor:
    """The `width` likeliest tokens by a draft behind each place of an answer, int64 [R, W]; -1: none.

    Of these entries of its ids, where they are given.
    """
    found = torch.full((text.answer, width), -1, dtype=torch.int64)
    if text.answer < 2:
        return found
    anchors = anchors_of(text, _ALL, torch.Generator())
    batch = blocks([text], [anchors], 1, draft.scale_ND)
    logits = draft.logits(draft.guessed(batch, 1), batch.before_BAL, among_S)[0, :, 0]
    ids = draft.ids if among_S is None else draft.ids[among_S]
    count = min(width, logits.shape[-1])
    found[anchors + 1 - text.prompt, :count] = ids[logits.topk(count, dim=-1).indices]
    return found
