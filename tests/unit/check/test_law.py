"""The quantile of a token in its law, and the statistic of many quantiles."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.check.law import chi_square, quantiles
from specinfer.sampling_params import SamplingParams


class Stated:
    """A target that states these laws, one after the other, and remembers after what."""

    def __init__(self, *laws: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        self.model = SimpleNamespace(dtype=dtype)
        with np.errstate(divide="ignore"):
            self.rows = np.log(np.array(laws)).astype(np.float32)

    def logits_along(self, text: Sequence[int], start: int) -> Any:
        self.asked = list(text), start
        return self.rows


class Point:
    """A generator that always says the same."""

    def __init__(self, at: float) -> None:
        self.at = at

    def random(self) -> float:
        return self.at


def place_of(token: int, law: Sequence[float], at: float, **sampling: Any) -> float:
    target: Any = Stated(law)
    chance: Any = Point(at)
    (found,) = quantiles(target, [7], [0, token], SamplingParams(**sampling), chance)
    return float(found)


def test_sampling_parameters_are_part_of_the_law() -> None:
    assert place_of(3, [0.1, 0.5, 0.1, 0.3], 0.0, top_p=0.6) == pytest.approx(0.625)
    assert place_of(1, [0.2, 0.8], 0.5, temperature=0.5) == pytest.approx(0.5 * 16 / 17)


def test_a_forbidden_token_has_no_place_unless_rounding_forbade_it() -> None:
    assert np.isnan(place_of(0, [0.1, 0.5, 0.1, 0.3], 0.5, top_p=0.6))
    almost = place_of(0, [0.29999, 0.4, 0.3, 0.00001], 0.5, top_p=0.6)
    assert 0.999 < almost < 1


def test_the_first_token_is_not_counted_and_the_laws_are_those_after_the_text_so_far() -> None:
    target: Any = Stated([0.5, 0.5], [0.9, 0.1])
    found = quantiles(target, [3, 4], [1, 1, 0], SamplingParams(), np.random.default_rng(0))
    assert found.shape == (2,)
    assert 0.5 <= found[0] < 1
    assert 0 <= found[1] < 0.9
    assert target.asked == ([3, 4, 1, 1], 3)
    assert quantiles(target, [3, 4], [1], SamplingParams(), np.random.default_rng(0)).shape == (0,)


def test_places_of_an_honest_sampler_are_even_and_those_of_a_top_1_are_not() -> None:
    generator = np.random.default_rng(1)
    laws = generator.dirichlet([0.3] * 8, size=3000)
    target: Any = Stated(*laws)
    for honest in (True, False):
        tokens = [
            generator.choice(8, p=law) if honest or generator.random() > 0.3 else law.argmax() for law in laws
        ]
        found = quantiles(target, [0], [0, *tokens], SamplingParams(), generator)
        p_value = chi_square(np.histogram(found, bins=10, range=(0, 1))[0])
        assert p_value > 0.01 if honest else p_value < 1e-10
