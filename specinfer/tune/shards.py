"""What was collected, on disk: shards, safetensors files of a few dozen texts each.

    tokens            int32   [T]           all texts, one behind the other
    lengths, prompts  int64   [n]           tokens of each text, and how many of them are its prompt
    taps              floats  [T - n, N, D] the target's hidden states: of all tokens but each text's last
    label_ids         int32   [R, K]        the tokens the target thinks likeliest behind the prompt's last
    label_logprobs    float16 [R, K]        token and each of the answer's but the last; -inf: there are fewer
    keys              int64   [n]           of the prompts
    held_out          bool    [n]
    seconds           float64 [1]           that it took to make

A shard has its name when it is whole, so who is killed while making one loses that one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.safetensors import FLOATS, TensorEntry, read_entries, write_safetensors

LABELS: Final = 64  # tokens whose log-probabilities are kept of each place
_DTYPES: Final = {**FLOATS, "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_NAMES: Final = ("tokens", "lengths", "prompts", "taps", "label_ids", "label_logprobs", "keys", "held_out")


@dataclass(frozen=True, slots=True, eq=False)
class TunedText:
    """One text with what its target thought on the way.

    T tokens, P of them the prompt's; N taps, K labels of each of the answer's tokens.
    """

    tokens_T: Tensor
    prompt: int  # P
    taps_TND: Tensor  # of all tokens but the last: [T - 1, N, D]
    label_ids_RK: Tensor  # [T - P, K]: row i is about token P + i
    label_logprobs_RK: Tensor
    key: int
    held_out: bool
    counts_R: Tensor | None = None  # how much each token of the answer counts; None: 1

    @property
    def weights_R(self) -> Tensor:
        """How much each token of the answer counts, float32 [T - P]."""
        return torch.ones(self.answer) if self.counts_R is None else self.counts_R

    @property
    def answer(self) -> int:
        """Tokens behind the prompt."""
        return len(self.tokens_T) - self.prompt


def write_shard(path: Path, texts: Sequence[TunedText], seconds: float) -> None:
    """Write texts that took so many seconds to `path`, whole or not at all; raises OSError."""
    tensors = {
        "tokens": torch.cat([text.tokens_T.to(torch.int32) for text in texts]),
        "lengths": torch.tensor([len(text.tokens_T) for text in texts]),
        "prompts": torch.tensor([text.prompt for text in texts]),
        "taps": torch.cat([text.taps_TND for text in texts]),
        "label_ids": torch.cat([text.label_ids_RK.to(torch.int32) for text in texts]),
        "label_logprobs": torch.cat([text.label_logprobs_RK.to(torch.float16) for text in texts]),
        "keys": torch.tensor([text.key for text in texts]),
        "held_out": torch.tensor([text.held_out for text in texts]),
        "seconds": torch.tensor([seconds], dtype=torch.float64),
    }
    write_safetensors(path, tensors, mode=0o600)


class Shard:
    """An open shard; its texts are read one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError where it is damaged."""
        self.path = path
        self._entries = entries = read_entries([path], _DTYPES)
        missing = [name for name in (*_NAMES, "seconds") if name not in entries]
        if missing:
            raise ModelFileError(f"{path} lacks {missing[0]!r}: it is no shard of collected texts")
        self._lengths = _whole(entries["lengths"]).tolist()
        self._prompts = _whole(entries["prompts"]).tolist()
        self.keys: list[int] = _whole(entries["keys"]).tolist()
        self.held_out: list[bool] = _whole(entries["held_out"]).tolist()
        self.seconds = float(_whole(entries["seconds"]))
        self._starts, self._labels = [0], [0]
        for length, prompt in zip(self._lengths, self._prompts, strict=True):
            self._starts.append(self._starts[-1] + length)
            self._labels.append(self._labels[-1] + length - prompt)
        if (
            entries["tokens"].shape[0] != self._starts[-1]
            or entries["taps"].shape[0] != self._starts[-1] - len(self)
            or entries["label_ids"].shape[0] != self._labels[-1]
        ):
            raise ModelFileError(f"{path} is damaged: its texts have other lengths than its tensors")

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def answers(self) -> int:
        """Tokens of all answers."""
        return self._labels[-1]

    def answer(self, number: int) -> int:
        """Tokens of a text's answer."""
        return self._labels[number + 1] - self._labels[number]

    def text(self, number: int) -> TunedText:
        """Read one of its texts."""
        start, stop = self._starts[number], self._starts[number + 1]
        labels = self._labels[number], self._labels[number + 1]
        entries = self._entries
        return TunedText(
            entries["tokens"].read_rows(start, stop).long(),
            self._prompts[number],
            entries["taps"].read_rows(start - number, stop - number - 1),
            entries["label_ids"].read_rows(*labels).long(),
            entries["label_logprobs"].read_rows(*labels).float(),
            self.keys[number],
            self.held_out[number],
        )

    def labels(self) -> tuple[Tensor, Tensor]:
        """The labels of all texts: ids and log-probabilities, [R, K] each."""
        return (
            _whole(self._entries["label_ids"]).long(),
            _whole(self._entries["label_logprobs"]).float(),
        )


class Corpus:
    """All shards of a folder. What is damaged (a power cut's) is left out, and its names are kept."""

    def __init__(self, folder: Path, columns: Sequence[int] | None = None) -> None:
        """`columns` are the taps to be read, of those that were collected; None: all."""
        self.folder = folder
        self._columns = None if columns is None else [*columns]
        self._shards: list[Shard] = []
        self.damaged: list[str] = []
        self._texts: dict[bool, list[tuple[Shard, int]]] = {
            False: [],
            True: [],
        }  # by whether they are held out
        self._next = 0
        for path in sorted(folder.glob("*.safetensors")):
            self._open(path)

    def _open(self, path: Path) -> None:
        self._next = max(self._next, int(path.stem) + 1 if path.stem.isdecimal() else 0)
        try:
            shard = Shard(path)
        except ModelFileError:
            self.damaged.append(path.name)
            return
        self._shards.append(shard)
        for number, held_out in enumerate(shard.held_out):
            self._texts[held_out].append((shard, number))

    def add(self, texts: Sequence[TunedText], seconds: float) -> None:
        """Keep these as one more shard; raises OSError."""
        path = self.folder / f"{self._next:05d}.safetensors"
        write_shard(path, texts, seconds)
        self._open(path)

    @property
    def keys(self) -> set[int]:
        """Of all prompts that were answered."""
        return {key for shard in self._shards for key in shard.keys}

    @property
    def seconds(self) -> float:
        """That collecting took."""
        return sum(shard.seconds for shard in self._shards)

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(shard.answers for shard in self._shards)

    def count(self, *, held_out: bool) -> int:
        """Texts that are held out, or that are not."""
        return len(self._texts[held_out])

    def text(self, number: int, *, held_out: bool) -> TunedText:
        """Read one of these."""
        shard, place = self._texts[held_out][number]
        text = shard.text(place)
        return text if self._columns is None else replace(text, taps_TND=text.taps_TND[:, self._columns])

    def shards(self) -> Sequence[Shard]:
        """All of them, in the order they were made."""
        return self._shards


def _whole(entry: TensorEntry) -> Tensor:
    return entry.read_rows(0, entry.shape[0])
