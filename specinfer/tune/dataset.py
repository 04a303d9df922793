"""Training data: shards of collected answers, the texts of a training set, and blocks of them.

A shard is a safetensors file of a few dozen texts:

    tokens            int32   [T]           all texts, concatenated
    lengths, prompts  int64   [n]           tokens of each text, and tokens of its prompt
    taps              floats  [T - n, N, D] the target's hidden states: of all tokens but each text's last
    label_ids         int32   [R, K]        the target's likeliest next tokens after the prompt's last token
    label_logprobs    float16 [R, K]        and after each answer token but the last; -inf: padding
    keys              int64   [n]           of the prompts
    held_out          bool    [n]
    seconds           float64 [1]           time it took to collect

A shard gets its name once it is complete, so a process that is killed while writing loses that shard alone.

A block is an anchor in an answer and the levels after it; each level predicts one token:

    text     p p p p a a a a a a a        p: prompt, a: answer
    block            ^ 1 2 3              level l predicts token anchor + l

A block reads hidden states of the tokens before its anchor. Each guess is conditioned on the true tokens.
Shapes: B texts, T tokens of the longest, A anchors per text, L levels, K labels, N taps, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.quantized.pieces import TensorEntry
from specinfer.models.safetensors import FLOATS, read_entries, write_safetensors

LABELS: Final = 64  # tokens per position whose log-probabilities are kept
_DTYPES: Final = {**FLOATS, "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_NAMES: Final = ("tokens", "lengths", "prompts", "taps", "label_ids", "label_logprobs", "keys", "held_out")


@dataclass(frozen=True, slots=True, eq=False)
class TunedText:
    """A text with the target's hidden states and labels; its answer has at least two tokens.

    T tokens, P of them in the prompt; N taps, K labels for each token of the answer.
    """

    tokens_T: Tensor
    prompt: int  # P
    taps_TND: Tensor  # all tokens but the last: [T - 1, N, D]
    label_ids_RK: Tensor  # [T - P, K]: row i is for token P + i
    label_logprobs_RK: Tensor
    key: int
    held_out: bool
    counts_R: Tensor | None = None  # loss weight of each answer token; None: 1

    @property
    def weights_R(self) -> Tensor:
        """Loss weight of each answer token, float32 [T - P]."""
        return torch.ones(self.answer) if self.counts_R is None else self.counts_R

    @property
    def answer(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens_T) - self.prompt


def write_shard(path: Path, texts: Sequence[TunedText], seconds: float) -> None:
    """Write texts that took `seconds` to collect to `path`, completely or not at all; raises OSError."""
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


class CorpusShard:
    """An open shard; texts are read one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError if the file is damaged."""
        self.path = path
        self._entries = entries = read_entries([path], _DTYPES)
        missing = [name for name in (*_NAMES, "seconds") if name not in entries]
        if missing:
            raise ModelFileError(f"{path} lacks {missing[0]!r}: it is not a shard of collected texts")
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
            raise ModelFileError(f"{path} is damaged: the lengths of its texts do not match its tensors")

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def answers(self) -> int:
        """Tokens of all answers."""
        return self._labels[-1]

    def text(self, number: int) -> TunedText:
        """Read a text."""
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
        """Labels of all texts: ids and log-probabilities, [R, K] each."""
        return (
            _whole(self._entries["label_ids"]).long(),
            _whole(self._entries["label_logprobs"]).float(),
        )


class Corpus:
    """All readable shards of a folder; the names of damaged ones (after a power cut) are in `damaged`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: list[CorpusShard] = []
        self.damaged: list[str] = []
        # Keyed by held_out.
        self._texts: dict[bool, list[tuple[CorpusShard, int]]] = {False: [], True: []}
        self._next = 0
        for path in sorted(folder.glob("*.safetensors")):
            self._open(path)

    def _open(self, path: Path) -> None:
        self._next = max(self._next, int(path.stem) + 1 if path.stem.isdecimal() else 0)
        try:
            shard = CorpusShard(path)
        except ModelFileError:
            self.damaged.append(path.name)
            return
        self._shards.append(shard)
        for number, held_out in enumerate(shard.held_out):
            self._texts[held_out].append((shard, number))

    def add(self, texts: Sequence[TunedText], seconds: float) -> None:
        """Write these as one more shard; raises OSError."""
        path = self.folder / f"{self._next:05d}.safetensors"
        write_shard(path, texts, seconds)
        self._open(path)

    @property
    def keys(self) -> set[int]:
        """Keys of all answered prompts."""
        return {key for shard in self._shards for key in shard.keys}

    @property
    def seconds(self) -> float:
        """Time that collecting took."""
        return sum(shard.seconds for shard in self._shards)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(shard.answers for shard in self._shards)

    def count(self, *, held_out: bool) -> int:
        """Number of texts that are held out, or that are not."""
        return len(self._texts[held_out])

    def text(self, number: int, *, held_out: bool) -> TunedText:
        """Read one of these texts."""
        shard, place = self._texts[held_out][number]
        return shard.text(place)

    def shards(self) -> Sequence[CorpusShard]:
        """All shards, in the order they were written."""
        return self._shards


def _whole(entry: TensorEntry) -> Tensor:
    return entry.read_rows(0, entry.shape[0])


class TrainingSet:
    """Texts of a corpus that are not held out, as collected; may be empty."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return self.corpus.count(held_out=False)

    def text(self, number: int) -> TunedText:
        """Read a text."""
        return self.corpus.text(number, held_out=False)


def first_texts(dataset: TrainingSet, limit: int) -> Sequence[TunedText]:
    """The first `limit` texts, or all if there are fewer."""
    return [dataset.text(number) for number in range(min(limit, len(dataset)))]


@dataclass(frozen=True, slots=True, eq=False)
class BlockBatch:
    """Blocks of some texts; entries that are not `valid` are padding."""

    taps_BTND: Tensor  # float32, each value multiplied by its scale
    tokens_BT: Tensor  # `levels` longer than the taps
    anchors_BA: Tensor  # positions in the texts
    before_BAL: Tensor  # the token before each guess: the anchor, then true tokens
    next_BAL: Tensor  # the true token
    label_ids_BALK: Tensor  # the target's likeliest tokens
    label_probs_BALK: Tensor
    weights_BAL: Tensor  # loss weight of each guess
    valid_BAL: Tensor  # bool

    @property
    def anchor_ids_BA(self) -> Tensor:
        """The anchor token of each block."""
        return self.before_BAL[..., 0]


def anchors_of(text: TunedText, limit: int, generator: torch.Generator) -> Tensor:
    """Up to `limit` anchor positions of an answer, ascending; at least one."""
    places = torch.arange(text.prompt, len(text.tokens_T) - 1)
    if len(places) > limit:
        places = places[torch.randperm(len(places), generator=generator)[:limit]].sort().values
    return places


def block_batch(
    texts: Sequence[TunedText], anchors: Sequence[Tensor], levels: int, scale_ND: Tensor
) -> BlockBatch:
    """Blocks of `levels` levels at these anchors of the texts; each text has at least one anchor."""
    width = max(len(places) for places in anchors)
    rows = max(int(places[-1]) for places in anchors)  # a block reads hidden states before its anchor
    labels = texts[0].label_ids_RK.shape[1]
    taps_BTND = torch.zeros(len(texts), rows, *scale_ND.shape)
    tokens_BT = torch.zeros(len(texts), rows + levels, dtype=torch.int64)
    anchors_BA = torch.ones(len(texts), width, dtype=torch.int64)
    shape = (len(texts), width, levels)
    before, following = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    label_ids = torch.zeros((*shape, labels), dtype=torch.int64)
    label_probs = torch.zeros((*shape, labels))
    weights = torch.zeros(shape)
    valid = torch.zeros(shape, dtype=torch.bool)
    for i, (text, places) in enumerate(zip(texts, anchors, strict=True)):
        seen, count, end = int(places[-1]), len(places), len(text.tokens_T)
        # A draft that reads no hidden states may learn from answers collected for a head.
        taps_BTND[i, :seen] = text.taps_TND[:seen, : len(scale_ND)].float() * scale_ND
        known = text.tokens_T[: rows + levels]
        tokens_BT[i, : len(known)] = known
        anchors_BA[i, :count] = places
        guessed_AL = places[:, None] + 1 + torch.arange(levels)
        there_AL = guessed_AL.clamp(max=end - 1)
        valid[i, :count] = guessed_AL < end
        before[i, :count] = text.tokens_T[there_AL - 1]
        following[i, :count] = text.tokens_T[there_AL]
        label_ids[i, :count] = text.label_ids_RK[there_AL - text.prompt]
        label_probs[i, :count] = text.label_logprobs_RK[there_AL - text.prompt].exp()
        weights[i, :count] = text.weights_R[there_AL - text.prompt]
    return BlockBatch(
        taps_BTND, tokens_BT, anchors_BA, before, following, label_ids, label_probs, weights, valid
    )
