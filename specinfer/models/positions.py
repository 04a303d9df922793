"""Positions as pure data: rotary embeddings with their scalings, and ALiBi."""

from __future__ import annotations

from dataclasses import dataclass

from specinfer.errors import ModelError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: divides long wavelengths by `factor` and keeps short ones."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: divides frequencies with few turns within the original context by `factor`, and keeps others."""

    factor: float
    original_context: int
    attention_factor: float  # factor of cos and sin
    beta_fast: float = 32.0  # frequencies with more turns than this are kept
    beta_slow: float = 1.0  # those with fewer are divided; there is a ramp in between
    truncate: bool = True  # the ends of the ramp are whole frequencies


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling beyond the original context: theta grows with a token's position.

    The token at position p is rotated as in a text of p + 1 tokens that ends with it. So a rotation depends
    on its position alone, and cached keys stay valid.
    """

    factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE: divides each frequency by its own factor, from one of two sets.

    One set is for texts up to the original context, the other for longer ones. Cached keys must stay valid
    while a text grows, so an open model uses one set (`ModelConfig.for_texts_of`).
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    extended_context: int  # maximum length of a text
    attention_factor: float  # factor of cos and sin, for both sets
    extended: bool = False  # False: the short set

    @property
    def divisors(self) -> tuple[float, ...]:
        """The factors that frequencies are divided by."""
        return self.long if self.extended else self.short


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding; at most one of the scalings is set."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None  # one per frequency (GGUF rope_freqs)
    yarn: YarnScaling | None = None
    dynamic: DynamicScaling | None = None
    longrope: LongRope | None = None
    # Number of rotated elements of a head; None: all. Pair i is elements i and i + head_dim / 2 in any case,
    # since model files are read in that order (sources.py).
    rotated: int | None = None

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin."""
        scaling = self.yarn or self.longrope
        return 1.0 if scaling is None else scaling.attention_factor


@dataclass(frozen=True, slots=True)
class Alibi:
    """ALiBi (Press et al., 2022): each head's scores decrease with the distance of a key, in place of rope.

    Distances are along a row's own path.
    """

    slopes: tuple[float, ...]  # per query head
    # Falcon adds slope * position of the key to scores before scaling, both rounded to bfloat16.
    rounded: bool = False

    @classmethod
    def of(cls, heads: int, *, steepest: float = 8.0, rounded: bool = False) -> Alibi:
        """The paper's slopes for `heads` heads: 2 ** (-steepest * i / heads), i = 1, 2, ...

        If `heads` is not a power of two, they are every other slope of the next power, then as many of the
        rest as needed. `steepest` is MPT's `alibi_bias_max`.
        """
        power = 1 << (heads - 1).bit_length()
        all_of_them = [2.0 ** (-steepest * i / power) for i in range(1, power + 1)]
        chosen = all_of_them if power == heads else all_of_them[1::2] + all_of_them[::2]
        return cls(tuple(chosen[:heads]), rounded)


def check_rope(rope: Rope, head_dim: int) -> None:
    """Raise ModelError if an embedding does not fit heads of that size."""
    rotated = head_dim if rope.rotated is None else rope.rotated
    if head_dim % 2:
        raise ModelError(f"head size {head_dim} is odd; rotary embeddings need an even one")
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise ModelError(
            f"rotary embeddings rotate {rotated} of a head's {head_dim} elements; allowed: an even number"
        )
    if rope.divisors is not None and len(rope.divisors) != rotated // 2:
        raise ModelError(
            f"rope_freqs has {len(rope.divisors)} values for {rotated // 2} frequencies; "
            "the file is damaged, get it again"
        )
    if rope.longrope is not None:
        for name, factors in (("long", rope.longrope.long), ("short", rope.longrope.short)):
            if len(factors) != rotated // 2:
                raise ModelError(
                    f"longrope's {name} factors are {len(factors)}, for {rotated // 2} frequencies; "
                    "the config is damaged, get it again"
                )
    if rope.yarn is not None and rope.theta <= 1:
        raise ModelError(f"rope_theta is {rope.theta}; YaRN needs more than 1")
    if rope.dynamic is not None and rotated < 4:
        raise ModelError(f"dynamic rope scaling of {rotated} rotated elements; allowed: 4 or more")
