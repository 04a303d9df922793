"""HostedModel: a pass runs transformers' code on all rows of a step, as if they were one text.

Paths determine which rows a row attends to, and its position id is its place in its text. Each model is tried
when it is loaded: rows read one by one, as a chain and as nodes of a tree must have the same bits. Otherwise
the code between products runs one row at a time; a model that fails even then is rejected.

Shapes: T rows of a step, R rows that are read, D hidden size, V vocabulary.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specinfer.attention.backend import Attend, Paths
from specinfer.errors import UnhostedError
from specinfer.kernels.product import NativeProduct, Product
from specinfer.models.hosted.attention import ATTENTION, EXPERTS, PassAttention, specs_of
from specinfer.models.hosted.folder import HostedFolder, experts_of, own_tensors
from specinfer.models.hosted.modules import (
    VECTOR,
    PassRows,
    ProductExperts,
    ProductLinear,
    RowByRow,
    WholeVectors,
)
from specinfer.models.hosted.native_modules import native_forward
from specinfer.models.hosted.skeleton import (
    OUTPUT,
    given_states,
    is_experts,
    keeps_float32,
)
from specinfer.models.language_model import LanguageModel, PassContext, PassOutput
from specinfer.models.weight_memory import Weights

_LOG = logging.getLogger(__name__)
# The rows of a trial: a text, and a tree below its fourth token that contains the rest of it as a path.
_TEXT: Final = 6
_BEFORE: Final = 3
_MANY: Final = 160  # rows in a long pass of the same text
_TREE: Final = (-1, 0, 0, 1, 2, 2, 2, 5, 5, 0, 1, 1, 3, 3, 4, 4, 0)  # parents
_PATH: Final = (0, 2, 5)  # nodes with the tokens of the text
_BLOCK: Final = 8


class HostedModel(LanguageModel):
    """A model whose layers transformers computes, with specinfer's attention, products and caches."""

    def __init__(self, folder: HostedFolder, weights: Weights) -> None:
        """Reads all weights; raises UnhostedError if rows depend on each other in any mode."""
        super().__init__(folder.config, weights)
        skeleton = folder.made(weights.dtype)
        self.summary = folder.summary  # the code that runs it
        self._skeleton = skeleton
        self._model = skeleton.model
        self._rows = PassRows()
        self._alone = False  # logits are computed one row at a time
        self._offset = 0  # position id of a text's first token
        self._fill(folder, weights)
        self._attention = PassAttention(
            specs_of(skeleton.calls, self.dtype), [one.value_size for one in skeleton.calls]
        )
        calling = {id(call.module) for call in skeleton.calls}
        ops = self.kernels.ops
        uneven = list[WholeVectors]()
        for module in self._model.modules():
            setattr(module, ATTENTION, self._attention)
            if _multiplies(module) and not any(id(one) in calling for one in module.modules()):
                module.forward = RowByRow(module.forward, self._rows)
            elif native := native_forward(module, skeleton.calls, self._attention, ops, self.device):
                module.forward = native
            elif self._is_uneven(module, VECTOR if id(module) in calling else 2 * VECTOR):
                uneven.append(WholeVectors(module.forward))
                module.forward = uneven[-1]
        self._offset = self._first_position()
        if self._offset:
            self.config = replace(self.config, max_context=self.config.max_context - self._offset)
        if self.device.type == "cpu":
            with _none_loose(self._products()):
                self._try_rows(folder)
            for one in uneven:
                one.settle()

    def read(
        self,
        token_ids_T: Tensor,
        context: PassContext,
        rows: Tensor | None = None,
        *,
        max_logits: int = 0,
        stage_input_TD: Tensor | None = None,
    ) -> PassOutput:
        """A whole pass up to the head; see LanguageModel."""
        if context.taps or stage_input_TD is not None:
            raise ValueError("a hosted model has no taps, and no stages")
        if not len(token_ids_T):
            return PassOutput(torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device))
        positions_T = context.positions_T + self._offset if self._offset else context.positions_T
        hidden_TD = self._run(token_ids_T, positions_T, context.attend)
        return PassOutput(hidden_TD if rows is None else hidden_TD.index_select(0, rows))

    def _run(self, token_ids_T: Tensor, position_ids_T: Tensor | None, attend: Attend) -> Tensor:
        """The output of the model's own code for these rows, [T, D]."""
        self._rows.count = len(token_ids_T)
        self._attention.begin(attend)
        places = {} if position_ids_T is None else {"position_ids": position_ids_T[None]}
        with _one_thread(self.device):
            made = self._skeleton.base(input_ids=token_ids_T[None], use_cache=False, **places)
        self._attention.end()
        hidden_TD: Tensor = made.last_hidden_state[0]
        return hidden_TD

    def logits(self, h_RD: Tensor) -> Tensor:
        """The logits of rows of `read`, [R, V]; see LanguageModel."""
        if self._skeleton.plain_head:
            return self.output(h_RD.contiguous())
        if not len(h_RD):
            return self.output(h_RD)
        parts = h_RD.tensor_split(len(h_RD)) if self._alone else [h_RD]
        return torch.cat([self._logits(part) for part in parts])

    def _logits(self, h_RD: Tensor) -> Tensor:
        """The logits of a few rows at once, by the model's own code."""
        self._rows.count = len(h_RD)
        tokens = torch.zeros(1, len(h_RD), dtype=torch.int64, device=self.device)
        with _one_thread(self.device), given_states(self._model, self._skeleton.base_name) as given:
            given.hidden = h_RD[None]
            made: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return made[0].to(self.dtype).contiguous()

    def _fill(self, folder: HostedFolder, weights: Weights) -> None:
        """Set the weights of all modules."""
        skeleton, model = self._skeleton, self._model
        self.table = weights.table(f"{skeleton.embedding_path}.weight")
        paths = {id(module): path for path, module in model.named_modules()}
        for path, module in model.named_modules():
            if isinstance(module, ProductLinear):
                if module.stack is None:
                    module.product = self._product(folder, weights, module, path)
                elif module is module.stack.layers[-1]:
                    names = [skeleton.product_name(one, paths[id(one)]) for one in module.stack.layers]
                    module.stack.product = weights.linear(*names, bias=module.bias is not None)
                continue
            done: set[str] = set()
            if is_experts(module):
                products = experts_of(module)
                done = {one for pair in products.values() for one in pair if one is not None}
                made = [
                    [
                        weights.linear(f"{path}.{name}.{number}", bias=bias is not None)
                        for name, (_, bias) in products.items()
                    ]
                    for number in range(module.num_experts)
                ]
                setattr(module, EXPERTS, ProductExperts(made))
            for name, kept in own_tensors(module):
                if name not in done:
                    full = f"{path}.{name}" if path else name
                    found = self._tensor(folder, weights, full, kept)
                    is_buffer = name in module._buffers
                    setattr(module, name, found if is_buffer else nn.Parameter(found, requires_grad=False))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    raise UnhostedError(f"computes {path}.{name} from nothing in the files")
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        assert skeleton.head.product is not None, "the head is one of the model's modules"
        self.output = skeleton.head.product

    def _product(self, folder: HostedFolder, weights: Weights, module: ProductLinear, path: str) -> Product:
        """The product of a linear layer."""
        bias = module.bias is not None
        if module is self._skeleton.head:
            if folder.tied:
                return weights.linear(self._skeleton.embedding_path, bias=bias, tied=self.table)
            return weights.linear(OUTPUT, bias=bias)
        name = self._skeleton.product_name(module, path)
        exact = module.weight.dtype is torch.float32 or keeps_float32(self._model, path)
        if exact and self.dtype is not torch.float32:
            without_memory = torch.zeros(()).expand(module.weight.shape)
            module.weight = nn.Parameter(without_memory, requires_grad=False)  # its dtype is read
            b = weights.exact(f"{name}.bias") if bias else None
            return partial(_row_by_row, weight=weights.exact(f"{name}.weight"), bias=b)
        return weights.linear(name, bias=bias)

    def _products(self) -> Iterator[Product | None]:
        for module in self._model.modules():
            if isinstance(module, ProductLinear):
                yield module.product if module.stack is None else module.stack.product
            for expert in getattr(getattr(module, EXPERTS, None), "experts", ()):
                yield from expert

    def _tensor(self, folder: HostedFolder, weights: Weights, name: str, kept: Tensor) -> Tensor:
        """A module's tensor; files may lack one that is computed."""
        if name == f"{self._skeleton.embedding_path}.weight" and self.table.whole is not None:
            return self.table.whole
        if not folder.has(name):
            if kept.is_meta:
                raise UnhostedError(f"computes {name} from nothing in the files")
            return kept.to(self.device)
        if not kept.is_floating_point() or not kept.dim():
            rows = kept.shape[0] if kept.dim() else 1
            return folder.read_rows(name, 0, rows).view(kept.shape).to(self.device, kept.dtype)
        exact = kept.dtype is torch.float32 or keeps_float32(self._model, name)
        return weights.exact(name) if exact else weights.tensor(name)

    def _is_uneven(self, module: Any, whole: int) -> bool:
        """True if a module may pass PyTorch rows that are not whole vectors.

        This is the case unless its layers' sizes are multiples of `whole` elements: twice a vector if their
        output may be split in two, a gate and its values.
        """
        if "Rotary" in type(module).__name__:
            return any(bool(one.numel() % VECTOR) for one in module.buffers())
        if is_experts(module):
            return bool(module.gate_up_proj.shape[1] % (2 * VECTOR)) if module.has_gate else True
        return any(
            isinstance(child, ProductLinear)
            and child is not self._skeleton.head
            and child.out_features % whole
            for child in module.children()
        )

    @torch.inference_mode()
    def _first_position(self) -> int:
        """The position id that the model's own code gives a text's first token.

        It is 0, or follows that of padding. Raises UnhostedError otherwise.
        """
        padding = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        vocab = self.config.vocab_size
        tokens = [one for one in range(vocab) if one != padding][-_TEXT:]
        want = self._pass(self._caches(), tokens, 0, None)
        for offset in (0, *([padding + 1] if isinstance(padding, int) else [])):
            if torch.equal(self._pass(self._caches(), tokens, 0, range(offset, offset + _TEXT)), want):
                return offset
        raise UnhostedError("computes positions of tokens by unsupported rules")

    def _try_rows(self, folder: HostedFolder) -> None:
        """Check that rows do not depend on each other, else run the code one row at a time."""
        with torch.inference_mode():
            if self._rows_are_independent():
                return
            self._alone = True
            calling = {id(call.module) for call in self._skeleton.calls}
            _isolate(self._skeleton.base, calling, self._rows)
            if not self._rows_are_independent():
                raise UnhostedError("has rows that depend on other rows")
        _LOG.warning(
            "%s: rows of %s depend on other rows in a pass; the code between its products runs "
            "one row at a time",
            *(folder.path.name, folder.architecture),
        )

    def _rows_are_independent(self) -> bool:
        vocab = self.config.vocab_size
        tokens = [(7919 * (place + 1)) % vocab for place in range(_TEXT)]
        single, chain, tree = (self._caches() for _ in range(3))
        want = torch.cat([self._rows_of(single, [token], place) for place, token in enumerate(tokens)])
        together = self._rows_of(chain, tokens, 0)
        self._rows_of(tree, tokens[:_BEFORE], 0)
        nodes = [(104729 * (place + 1)) % vocab for place in range(len(_TREE))]
        for node, token in zip(_PATH, tokens[_BEFORE:], strict=True):
            nodes[node] = token
        paths = [_below(node) for node in range(len(_TREE))]
        tails = [[_BEFORE + one for one in path] for path in paths]
        places = [self._offset + _BEFORE + len(path) for path in paths]
        of_tree = self._pass(tree, nodes, _BEFORE, places, tails)[list(_PATH)]
        # PyTorch computes many rows differently from a few: one part per thread, and another order of sums.
        many = min(_MANY, self.config.max_context)
        others = [(15485863 * (place + 1)) % vocab for place in range(_TEXT, many)]
        of_many = self._rows_of(self._caches(many), [*tokens, *others], 0)[:_TEXT]
        same = all(
            torch.equal(one, other)
            for one, other in ((together, want), (of_tree, want[_BEFORE:]), (of_many, want))
        )
        alone = torch.cat([self.logits(row) for row in want.tensor_split(len(want))])
        return same and torch.equal(self.logits(want), alone)

    def _rows_of(self, attention: Any, tokens: Sequence[int], before: int) -> Tensor:
        """As `_pass`, for rows of text."""
        first = self._offset + before
        return self._pass(attention, tokens, before, range(first, first + len(tokens)))

    def _pass(
        self,
        attention: Any,
        tokens: Sequence[int],
        before: int,
        positions: Sequence[int] | None,
        tails: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """The head's input for these rows of a text, after `before` positions of a cache.

        Position ids are `positions`; None: computed by the model's code. With `tails` rows are nodes of a
        tree: each also reads these positions.
        """
        count = len(tokens)
        paths = Paths.of(
            [0, count, 0, before + count],
            [before + 1] * count if tails else range(before + 1, before + count + 1),
            [0, *accumulate(map(len, tails or [()] * count))],
            [one for tail in tails for one in tail],
            tables=[[*range(-(-(before + count) // _BLOCK))]],
            block_size=_BLOCK,
        )
        tokens_T = torch.tensor(tokens, device=self.device)
        positions_T = None if positions is None else torch.tensor(positions, device=self.device)
        return self._run(tokens_T, positions_T, attention.bind(paths))

    def _caches(self, positions: int = 4 * _BLOCK) -> Any:
        """Attention over a separate cache of at least `positions` positions, for a trial."""
        config = self.config
        shape = (-(-positions // _BLOCK) * _BLOCK, config.num_kv_heads, config.head_dim)
        zeros = partial(torch.zeros, shape, dtype=self.dtype, device=self.device)
        keys, values = ([zeros() for _ in range(config.num_layers)] for _ in range(2))
        return self.kernels.attention.over(keys, values)


def _multiplies(module: nn.Module) -> bool:
    """True if a module multiplies with its own matrices without a specinfer product."""
    if isinstance(module, ProductLinear | nn.Embedding) or is_experts(module):
        return False
    own = any(one is not None and one.dim() > 1 for one in module._parameters.values())
    return own or any(isinstance(child, nn.Linear) for child in module.children())


def _below(node: int) -> list[int]:
    """A node of the trial's tree and its ancestors below the root, ascending."""
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = _TREE[node]
    return path[::-1]


def _row_by_row(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product in float32 for any dtype of x, one row after another."""
    return torch.cat([F.linear(row.float(), weight, bias) for row in x.tensor_split(len(x))])


def _isolate(module: nn.Module, calling: set[int], rows: PassRows) -> None:
    """Run what is below `module` one row at a time, except products and modules that call attention."""
    for child in module.children():
        if any(id(one) in calling for one in child.modules()):
            _isolate(child, calling, rows)
        elif not isinstance(child, ProductLinear | nn.Embedding) and not isinstance(child.forward, RowByRow):
            child.forward = RowByRow(child.forward, rows)


@contextlib.contextmanager
def _none_loose(products: Iterator[Product | None]) -> Iterator[None]:
    """Within the block rows of a draft's loose products do not depend on each other either."""
    loose = [one.args for one in products if isinstance(one, NativeProduct) and one.args.loose]
    for args in loose:
        args.loose = False
    try:
        yield
    finally:
        for args in loose:
            args.loose = True


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Within the block PyTorch uses one thread; with several it splits tensors at any element."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
