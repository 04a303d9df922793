"""Initial weights of a head: random, or computed from its target's weights and answers.

A randomly initialized head spends most of a short training on parts that can be computed directly:

    bigrams  bigram statistics from the target's distributions, as the Markov term
    layers   the target's last layers, which produce the hidden state that the next token is predicted from
    entry    a least-squares prediction of later hidden states from the last hidden state and the next token
    norm     the last norm, scaled to minimize the loss

Shapes: N taps, D hidden size, R rows of a block, X = 2 D input values of a row, U tokens in its vocabulary,
M rank of the Markov term.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import read_tensor, target_embedding, target_head
from specinfer.heads.config import BlockConfig, EagleConfig, MtpConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.layers import HeadLayer, initialise
from specinfer.heads.mtp_head import MtpHead, last_norm
from specinfer.models.config import Activation, Family, ModelConfig, QkNorm
from specinfer.models.open_model import OpenModel
from specinfer.models.positions import Rope
from specinfer.tune.dataset import Corpus, TrainingSet, TunedText, first_texts
from specinfer.tune.draft import TrainableDraft

Head = BlockHead | EagleHead | MtpHead
DEFAULT_VOCABULARY: Final = 8192  # default number of tokens in a new head's vocabulary
_OUTPUT_SCALE: Final = 0.1  # initial scale of the target's output layer
_LAYER_SCALE: Final = 4.0  # initial scale of the layers' output matrices, over the usual deviation
_SCALE_TEXTS: Final = 64  # texts from which the scale of hidden states is measured
_MIN_DIVISOR: Final = 1e-6  # lower bound of a divisor
_NORM_SCALES: Final = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)
_MIN_PROB: Final = 1e-3  # below it a label is not counted
_PSEUDO_COUNTS: Final = 3.0  # pseudo-counts per token, distributed as tokens overall
_ROWS: Final = 60_000  # rows that suffice for least squares
_RIDGE: Final = 1e-2  # times the mean square of the inputs
_PRODUCTS: Final = ("self_attn.o_proj", "mlp.down_proj")
_BEHIND_NORMS: Final = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def head_body_config(target: ModelConfig, family: Family, layers: int) -> ModelConfig:
    """Config of `layers` layers of the target's sizes; those of QWEN3 normalize queries and keys."""
    rope = target.rope if target.rope is not None else Rope(10000.0)
    return ModelConfig(
        family=family,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        norm_eps=target.norm_eps,
        rope=Rope(rope.theta),
        layer_windows=(None,) * layers,
        tie_embeddings=False,
        qk_norm=QkNorm.HEAD if family is Family.QWEN3 else QkNorm.NONE,
        attention_scale=target.head_dim**-0.5,
        max_context=target.max_context,
    )


def check_trainable(target: ModelConfig) -> None:
    """Raise ModelError for targets whose layers cannot be trained here."""
    if target.activation is not Activation.SILU or not target.plain_layers:
        raise ModelError(
            f"no draft can be trained for {target.family} yet; supported: Llama, Mistral and Qwen"
        )


def frequent_tokens(corpus: Corpus, count: int, vocab: int) -> list[int]:
    """The `count` tokens with the largest total probability under the target, in ascending order."""
    masses_V = torch.zeros(vocab, dtype=torch.float64)
    for shard in corpus.shards():
        ids, logprobs = shard.labels()
        masses_V.index_add_(0, ids.flatten(), logprobs.flatten().double().exp())
    likely: list[int] = masses_V.argsort(descending=True, stable=True)[:count].sort().values.tolist()
    return likely


def hidden_scale(
    dataset: TrainingSet, read: Callable[[Tensor], Tensor] = lambda taps_TND: taps_TND
) -> Tensor:
    """Factors that bring each component of the hidden states to a root mean square of 1, float32 [N, D].

    They are measured in the first training texts, behind `read`. Some components of a target's hidden states
    are a thousand times as large as others. Unscaled, a head learns from these alone for a long time.
    """
    squares: Tensor | None = None
    rows = 0
    for text in first_texts(dataset, _SCALE_TEXTS):
        # In most targets the first token's states are by far the largest, so they are left out.
        taps_TND = read(text.taps_TND[1:].float()).double()
        found_ND = taps_TND.square().sum(dim=0)
        squares = found_ND if squares is None else squares + found_ND
        rows += len(taps_TND)
    assert squares is not None
    return (squares / max(rows, 1)).sqrt().clamp(min=_MIN_DIVISOR).reciprocal().float()


def new_head(
    config: BlockConfig | EagleConfig | MtpConfig, target: OpenModel, ids: list[int], seed: int
) -> Head:
    """A randomly initialized head with the target's output layer and last norm.

    With tied embeddings an unscaled head would predict its anchor again with certainty. So the logits are
    scaled down at first, and the layers' outputs are scaled up relative to the embedding.
    """
    config = replace(config, draft_vocab_size=len(ids))
    head: Head
    if isinstance(config, MtpConfig):
        head = MtpHead(config, ids)
    else:
        head = BlockHead(config, ids) if isinstance(config, BlockConfig) else EagleHead(config, ids)
    output_UD = target_head(target, ids)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target_embedding(target))
        head.lm_head.weight.copy_(output_UD)
    generator = torch.Generator().manual_seed(seed)
    initialise(head, generator)
    with torch.no_grad():
        if config.own_head:
            head.lm_head.weight.copy_(_OUTPUT_SCALE * output_UD)
        for layer in head.layers:
            assert isinstance(layer, HeadLayer)
            layer.self_attn.o_proj.weight.mul_(_LAYER_SCALE)
            layer.mlp.down_proj.weight.mul_(_LAYER_SCALE)
        if isinstance(head, MtpHead):
            head.last_norm.weight.copy_(last_norm(target))
        head.norm.weight.copy_((1.0 if config.own_head else _OUTPUT_SCALE) * last_norm(target))
        # Inputs have a root mean square of about 1; keep this for the output.
        head.fc.weight.mul_(1 / (0.02 * math.sqrt(head.fc.in_features)))
        if isinstance(head, BlockHead) and head.config.reads_last:
            head.entry.weight.mul_(1 / (0.02 * math.sqrt(head.entry.in_features)))
    return head


def calibrate_norm(draft: TrainableDraft, loss: Callable[[TrainableDraft], float]) -> float:
    """Scale the last norm by the candidate factor with the smallest loss; return that loss."""
    norm = draft.last_norm
    whole_D = norm.weight.detach().clone()
    found: list[tuple[float, float]] = []
    with torch.no_grad():
        for scale in _NORM_SCALES:
            norm.weight.copy_(whole_D * scale)
            found.append((loss(draft), scale))
        smallest, best = min(found)
        norm.weight.copy_(whole_D * best)
    return smallest


def fit_bigrams(head: BlockHead, dataset: TrainingSet, entry_V: Tensor) -> None:
    """Set the Markov term to the distribution of a token given the one before it, up to its rank.

    The distribution is the mean of the target's own, shrunk toward the token frequencies. `entry_V` maps
    tokens to entries of the head's vocabulary; -1: it lacks the token.
    """
    rank, num_tokens = head.config.markov_rank, head.config.draft_vocab_size
    vocab = head.config.body.vocab_size
    places, masses = _bigrams(dataset, entry_V, num_tokens)
    singles_U = torch.zeros(num_tokens).index_add_(0, places[1], masses) + 0.1
    singles_U /= singles_U.sum()
    seen_V = torch.zeros(vocab).index_add_(0, places[0], masses)
    # Log ratio to the marginal distribution; 0 for pairs that were never seen.
    above = (1 + masses / (_PSEUDO_COUNTS * singles_U[places[1]])).log()
    weight_V = (seen_V + 0.5).sqrt()  # frequent rows need smaller errors
    law_VU = torch.sparse_coo_tensor(
        places, above * weight_V[places[0]], (vocab, num_tokens), check_invariants=True
    )
    kept = min(rank - 1, num_tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left_VM, sizes_M, right_UM = torch.svd_lowrank(law_VU, q=kept, niter=3)
    left_VM = left_VM / weight_V[:, None]
    # The same product, with both factors of similar norm.
    balance_M = (left_VM.norm(dim=0).clamp(min=1e-9) / right_UM.norm(dim=0).clamp(min=1e-9)).sqrt()
    root_M = sizes_M.sqrt()
    markov = head.markov_head
    with torch.no_grad():
        markov.markov_w1.weight.zero_()
        markov.markov_w2.weight.zero_()
        markov.markov_w1.weight[:, 0] = 1.0
        markov.markov_w2.weight[:, 0] = singles_U.log() - singles_U.log().mean()
        markov.markov_w1.weight[:, 1 : 1 + kept] = left_VM * root_M / balance_M
        markov.markov_w2.weight[:, 1 : 1 + kept] = right_UM * root_M * balance_M


def copy_target_layers(
    head: BlockHead, target: OpenModel, texts: Iterable[TunedText], scale_ND: Tensor
) -> None:
    """Initialize layers and norms from the target's last ones, and the entry by least squares.

    At first the head reads its last tap alone.
    """
    last = scale_ND.shape[0] - 1
    size = scale_ND.shape[1]
    with torch.no_grad():
        # The fused input is the last tap, divided by its root mean square.
        head.fc.weight.zero_()
        sizes_D = scale_ND[last].reciprocal()
        head.fc.weight[:, last * size :] = torch.diag(sizes_D * math.sqrt(size) / sizes_D.norm())
        first = target.config.num_layers - len(head.layers)
        for number, layer in enumerate(head.layers):
            assert isinstance(layer, HeadLayer)
            _copy_layer(layer, target, f"model.layers.{first + number}")
        head.norm.weight.copy_(last_norm(target))
        known_RX = _solve_entry(head, texts, scale_ND)
        for layer in () if target.config.qk_norm is QkNorm.HEAD else head.layers:
            assert isinstance(layer, HeadLayer)
            _set_norm_scales(layer, known_RX, head.entry.weight[:size])


def _bigrams(dataset: TrainingSet, entry_V: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Pairs of previous token [0] and next entry [1], with the target's probabilities summed."""
    codes: list[Tensor] = []
    masses: list[Tensor] = []
    for number in range(len(dataset)):
        text = dataset.text(number)
        before_R = text.tokens_T[text.prompt - 1 : -1]
        entries_RK = entry_V[text.label_ids_RK]
        probs_RK = text.label_logprobs_RK.exp() * text.weights_R[:, None]
        known_RK = (entries_RK >= 0) & (probs_RK >= _MIN_PROB)
        codes.append((before_R[:, None] * num_tokens + entries_RK)[known_RK])
        masses.append(probs_RK[known_RK])
    code, where = torch.unique(torch.cat(codes), return_inverse=True)
    summed = torch.zeros(len(code)).index_add_(0, where, torch.cat(masses))
    return torch.stack((code // num_tokens, code % num_tokens)), summed


def _copy_layer(layer: HeadLayer, target: OpenModel, prefix: str) -> None:
    """Copy a layer of the target's, with norm weights folded into the matrices after them.

    Keys and values can then be computed from inputs without norm weights.
    """

    def read(name: str) -> Tensor:
        return read_tensor(target, f"{prefix}.{name}.weight")

    parts = dict(layer.named_modules())
    for norm, products in _BEHIND_NORMS.items():
        factor_D = read(norm) + target.config.norm_weight_offset
        parts[norm].weight.fill_(1.0)
        for name in products:
            parts[name].weight.copy_(read(name) * factor_D)
    if target.config.qk_norm is QkNorm.HEAD:
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            parts[name].weight.copy_(read(name))
    for name in _PRODUCTS:
        parts[name].weight.copy_(read(name))


def _solve_entry(head: BlockHead, texts: Iterable[TunedText], scale_ND: Tensor) -> Tensor:
    """Solve for the entry: each row predicts the last tap at its position. Returns some of the inputs."""
    size, rows = head.config.body.hidden_size, head.config.block_size
    squares_XX = torch.zeros(2 * size, 2 * size)
    products_XY = torch.zeros(2 * size, rows * size)
    count = 0
    kept: list[Tensor] = []
    for text in texts:
        taps_TND = text.taps_TND
        anchors = torch.arange(2, len(taps_TND) - rows)  # skips the first token's states, which are outliers
        if not len(anchors):
            continue
        fused_TD = head.fused(taps_TND.float() * scale_ND)
        embedded = head.entry_norm(head.embed_tokens(text.tokens_T[anchors]))
        known_AX = torch.cat((fused_TD[anchors - 1], embedded), dim=1)
        wanted_AY = torch.cat([taps_TND[anchors + row, -1].float() for row in range(rows)], dim=1)
        squares_XX += known_AX.T @ known_AX
        products_XY += known_AX.T @ wanted_AY
        kept.append(known_AX[:: max(1, len(known_AX) // 16)])
        count += len(anchors)
        if count >= _ROWS:
            break
    if count < 2 * rows:
        return torch.zeros(0, 2 * size)
    squares_XX.diagonal().add_(_RIDGE * float(squares_XX.diagonal().mean()))
    head.entry.weight.copy_(torch.cholesky_solve(products_XY, torch.linalg.cholesky(squares_XX)).T)
    return torch.cat(kept)


def _set_norm_scales(layer: HeadLayer, known_RX: Tensor, entry_DX: Tensor) -> None:
    """Set the norms of queries and keys, which the target may lack, to the measured root mean squares."""
    attention = layer.self_attn
    if not len(known_RX) or not hasattr(attention, "q_norm"):
        return
    queries = attention.q_proj(layer.input_layernorm(known_RX @ entry_DX.T))
    keys = attention.k_proj(known_RX[:, : len(entry_DX)])
    for norm, made in ((attention.q_norm, queries), (attention.k_norm, keys)):
        norm.weight.fill_(float(made.square().mean().sqrt()))
