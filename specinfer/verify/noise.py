"""Counter-based noise: every random number is a pure function of seed, position and stream.

The functions have no state, so the target and a speculator can compute the same number, in any order, and for
a few token ids only. A request's seed and the absolute position of a token give three independent streams:

    exponentials(seed, position, ids)       the race of the coupled rule (verify/coupled.py)
    uniform(seed, position, index)          acceptance and the bonus token (verify/multistep.py)
    uniform(..., stream=draft_stream(...))  the draws of a sampling speculator

The exponential of a token is E = -log(1 - v). Here v = (h + 1/2) / 2**64, and h is a 64-bit hash of the token
id. So 2**-65 <= E < 46, and v <= E. The upper half of h needs 32-bit operations only, which are fast over a
whole vocabulary; the lower half is computed only for ids that can still win.
"""

from functools import cache
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK64: Final = (1 << 64) - 1
_GOLDEN64: Final = 0x9E3779B97F4A7C15
_RACE_STREAM: Final = 0
_VERIFY_STREAM: Final = 1
_DRAFT_BIT: Final = 1 << 63  # set in every draft stream, so that they differ from the two above


def mix64(x: int) -> int:
    """The finalizer of splitmix64 (Steele et al. 2014): a bijection of 64-bit integers, full avalanche."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def key_of(*words: int) -> int:
    """Return a 64-bit key that depends on every word and on their order; words are taken modulo 2**64."""
    key = 0
    for word in words:
        key = mix64(((key ^ (word & _MASK64)) + _GOLDEN64) & _MASK64)
    return key


def draft_stream(speculator: str, root_position: int) -> int:
    """Return the stream of a sampling speculator in the step whose tree starts at `root_position`.

    Each speculator and step has its own stream. A draw must be independent of other speculators' draws, and
    of guesses of earlier steps, from which a speculator or a policy may have learned.
    """
    name = int.from_bytes(blake2b(speculator.encode(), digest_size=8).digest())
    return key_of(name, root_position) | _DRAFT_BIT


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of one of n completions, in [0, 2**64).

    It is the request's, modulo 2**64, for the first one, and an unrelated one for others.
    """
    return seed & _MASK64 if index == 0 else key_of(seed, index) >> 1


def uniform(seed: int, position: int, index: int, *, stream: int = _VERIFY_STREAM) -> float:
    """Return a number in [0, 1), a multiple of 2**-53, so 0 is possible.

    Args:
        seed: the request's.
        position: absolute index of the token being chosen.
        index: the number of the value at this position.
        stream: the verifier's, or a `draft_stream`.
    """
    return (key_of(stream, seed, position, index) >> 11) * 2.0**-53


def exponentials(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the unit exponential of each token id, [ids], independent in seed, position and id.

    Its `-log` is the Gumbel noise of the coupled verifier. Values are in [2**-65, 46).
    """
    key = race_key(seed, position)
    return exponentials_from(high_halves(key, id_hashes(ids)), key, ids)


def race_key(seed: int, position: int) -> int:
    """Return the key that hashes the token ids of one position."""
    return key_of(_RACE_STREAM, seed, position)


def id_hashes(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the part of the upper half that depends only on the token id; a bijection of 32-bit ids."""
    h = ids.astype(np.uint32)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return h


@cache
def vocabulary_hashes(vocab: int) -> NDArray[np.uint32]:
    """Return `id_hashes` of 0..vocab-1, [vocab], read-only, computed once per vocabulary size."""
    hashes = id_hashes(np.arange(vocab, dtype=np.int64))
    hashes.flags.writeable = False
    return hashes


def high_halves(key: int, hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the upper 32 bits of each token's hash under `key`; five passes over `hashes`, not mutated.

    This is a second round of the mixer of `id_hashes` (constants: Wellons' hash-prospector). One half of the
    key enters before it and the other inside it, so that two keys never give permutations of one noise.
    """
    h = hashes ^ np.uint32(key & 0xFFFFFFFF)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h += np.uint32(key >> 32)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return h


def exponentials_from(highs: NDArray[np.uint32], key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the exponentials, [n], of token ids, [n], with these upper halves, [n]."""
    h = (highs.astype(np.uint64) << np.uint64(32)) | _low_halves(key, ids)
    v = (h.astype(np.float64) + 0.5) * 2.0**-64
    # Near 1, v lacks the low bits of 1 - v (and may round to 1), so 1 - v is computed from ~h.
    one_minus_v = ((~h).astype(np.float64) + 0.5) * 2.0**-64
    return -np.where(v < 0.5, np.log1p(-np.minimum(v, 0.5)), np.log(one_minus_v))


def _low_halves(key: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    x = ids.astype(np.uint64) * np.uint64(_GOLDEN64)
    x += np.uint64(mix64(key ^ _GOLDEN64))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(32)
