"""The kernels' tests again, with the libraries of every lesser kind of CPU than this one.

A level is the same C++ with other flags. Levels differ in the width of a register (vector.h, and so the rows
and channels of a loop), and in the rounding of products (the products, attention_blocks.h, powers in
attention.cpp). So tests of products and ops, which consist of such loops, run with all shapes of the best
level. The others run with these cases:

- Reads of logits: sizes below, at and above a register's, and large ones.
- Attention: every head size, every kind of batch, and windows that end within a vector.
- Recurrences: every kind, with sizes that fill vectors and that do not.
- Rows of a model: texts around the ends of blocks.
- Layers: the families that have all parts between them.

Tests that run only at the best level use no register, or not the library: choices in float64 after a read,
arbitrary rows, blocks of a cache, refusals, and PyTorch references.

If registers are as wide as at the next lesser level, only tests of products and layers run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from specinfer.kernels.build import find_library
from specinfer.kernels.choice import Kernels, native_kernels
from specinfer.kernels.library import Library, load_library
from specinfer.kernels.machine import VARIABLE, levels_here
from specinfer.kernels.native_ops import NativeOps
from specinfer.kernels.quantized import NativeProducts
from specinfer.kernels.sampling import NativeScan
from specinfer.models.gguf_blocks import FILE_BLOCKS
from tests.switched import RECURRENT, SWITCHED
from tests.unit.attention import test_backends, test_independence
from tests.unit.attention.paths import Layer
from tests.unit.kernels import (
    test_changed_rows,
    test_layer_kinds,
    test_layers,
    test_ops,
    test_partials,
    test_parts,
    test_products,
    test_recurrence,
    test_sampling,
    test_scans,
    test_stored_blocks,
)
from tests.unit.kernels.logit_rows import SIZES
from tests.unit.models import test_switches
from tests.unit.runtime import test_row_independence

NAN: Final = float("nan")
INFINITY: Final = float("inf")
DTYPES: Final = (torch.float32, torch.bfloat16)
# Each reads a row otherwise.
PARAMS: Final = ("greedy", "plain", "cold", "top_k", "top_p", "hot top_p", "all")
NONE: Final = ([NAN], [1.0, NAN], [INFINITY, 0.0], [-INFINITY], [INFINITY, NAN])  # no largest logit
AROUND_BLOCKS: Final = (12, 52, 60, 63, 64, 121, 500, 508, 512, 601)  # rows of a text


def products(native: Kernels, folder: Path) -> None:
    own = native.products
    assert isinstance(own, NativeProducts)
    for kind in test_products.KINDS:
        test_products.test_a_row_does_not_depend_on_the_rows_beside_it(own, kind)
        test_products.test_what_is_not_finite_stays_so(own, kind)
    for kind in test_products.NOISE:
        test_products.test_products_are_near_the_real_ones(own, kind)
    for kind in test_products.INTEGERS:
        test_products.test_native_products_and_twins_give_the_same_bits(own, kind)
        test_products.test_one_large_activation_leaves_the_others_their_bits(own, kind)
    for kind in FILE_BLOCKS:
        test_products.test_blocks_and_their_twins_give_the_same_bits(own, kind)
    test_products.test_levels_of_six_bits_give_the_bits_of_eight(own)
    test_products.test_few_rows_of_a_loose_product_have_the_bits_of_the_twins(own)
    test_products.test_sums_of_parts_of_blocks_are_added_by_the_tree(own)
    test_stored_blocks.check_all_kinds(own.library, folder)
    for kind in test_parts.KINDS:
        test_parts.check_order(own, kind)
        test_parts.check_shares(own, kind)
    test_partials.test_parts_add_up_to_the_whole()
    test_partials.test_what_is_not_finite_ends_its_own_row_alone()


def ops(native: Kernels, folder: Path) -> None:
    for dtype in DTYPES:
        for test in (
            test_ops.test_norms_alone_and_behind_a_sum,
            test_ops.test_activations,
            test_ops.test_embeddings,
            test_ops.test_the_clamped_swish_of_gpt_oss_is_what_is_stated,
            test_ops.test_streams_and_gates_that_are_cut_off,
            test_ops.test_far_gates_are_zero_or_themselves,
            test_ops.test_gelu_is_right_to_its_tails,
            test_ops.test_a_layer_norm_is_right_far_from_zero,
            test_ops.test_what_is_not_a_number_stays_so,
            test_ops.test_a_row_does_not_depend_on_the_rows_beside_it,
            test_ops.test_chosen_rows_are_normed_alone_and_nothing_is_added_in_place,
        ):
            test(native.ops, dtype)


def reads_of_logits(native: Kernels, folder: Path) -> None:
    scan = native.scan
    assert isinstance(scan, NativeScan)
    test_sampling.test_the_likeliest_tokens_and_the_mass_are_the_twins(scan)
    test_scans.test_the_likeliest_are_the_most_likely_of_each_row(scan)
    for vocab, name in product((17, 1025), ("plain", "top_p", "all")):
        params = test_sampling.PARAMS[name]
        test_sampling.test_laws_choices_and_guesses_are_the_twins(scan, vocab, params)
    for vocab, name in product((15, 16, 17, 1025, max(SIZES)), PARAMS):
        test_scans.test_choices_are_those_of_the_law(scan, vocab, test_scans.ALL_PARAMS[name])
    for vocab, name in product((41, 1025), PARAMS):
        params = test_scans.ALL_PARAMS[name]
        test_changed_rows.test_choices_in_changed_rows_are_those_of_the_law(scan, vocab, params)
    test_changed_rows.test_a_product_is_rounded_before_something_is_taken_from_it()
    without_largest = test_scans.test_a_row_without_a_finite_largest_logit_has_no_token_and_costs_no_other
    for values in NONE:
        without_largest(scan, values, 17)
    test_sampling.test_the_race_over_named_ids_is_the_twins(scan)


def attention(native: Kernels, folder: Path) -> None:
    backend = native.attention
    for dtype, extras in product(DTYPES, ({"norms": True, "rope": True}, {"rope": True}, {"norms": True})):
        test_backends.test_heads(backend, extras, dtype)
    for window in (None, 3, 100):
        test_backends.test_batches(backend, window)
    for extras, window in product(test_backends.OTHERWISE, (None, 3, 100)):
        test_backends.test_caps_biases_and_sinks(backend, extras, window)
    test_backends.test_nan_propagates(backend)
    for dtype, extras in product(DTYPES, (test_independence.USUAL, test_independence.OTHERWISE)):

        def layer(dtype: torch.dtype = dtype, extras: dict[str, Any] = extras) -> Layer:
            return Layer(6, 2, 64, dtype, norms=True, rope=True, **extras)

        for step, window in ((7, None), (17, 50)):
            test_independence.test_a_prompt_in_one_chunk_and_in_several(backend, layer(), step, window)
        for start in test_independence.STARTS:
            test_independence.test_a_path_of_a_tree_and_a_chain(backend, layer(), start)
        for start in (0, 57, 63, 190):
            test_independence.test_a_tree_level_by_level_and_at_once(backend, layer(), start)
        test_independence.test_alone_and_in_a_batch(backend, layer())
        test_independence.test_with_any_number_of_threads(backend, layer())


def recurrences(native: Kernels, folder: Path) -> None:
    own = native.ops
    assert isinstance(own, NativeOps)
    test_recurrence.test_rows_are_near_the_oracle(own)
    test_recurrence.test_a_text_in_pieces_has_the_bits_of_the_whole(own)
    test_recurrence.test_a_node_has_the_bits_of_its_path(own)
    test_layer_kinds.test_one_call_has_the_bits_of_its_steps(native)
    best = levels_here()[0]
    test_recurrence.check_same_bits(own, NativeOps(Library(find_library(best), best)))


def rows_of_a_model(native: Kernels, folder: Path) -> None:
    model = test_row_independence.write_model(folder)
    for dtype in DTYPES:
        runner = test_row_independence.runner_of(model, "native", dtype)
        assert test_row_independence.differing_lengths(runner, AROUND_BLOCKS) == []


def layers(native: Kernels, folder: Path) -> None:
    for family, weights in product(("llama-biases", "gemma3"), test_layers.FORMATS):
        own = folder / "-".join(map(str, (family, *weights)))
        own.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            test_layers.test_the_bits_are_those_of_op_by_op(family, weights, own, patch)
    for name in SWITCHED:
        for weights in test_layers.FORMATS:
            with pytest.MonkeyPatch.context() as patch:
                test_switches.test_one_call_has_the_bits_of_op_by_op(name, weights, patch)
        for dtype in DTYPES:
            test_switches.test_a_row_is_the_same_in_any_company(name, "native", dtype)
    for name in RECURRENT:
        test_switches.test_a_text_in_chunks_has_the_bits_of_the_whole(name, ("int4", torch.bfloat16))


Part = Callable[[Kernels, Path], None]
ALL: Final[tuple[Part, ...]] = (
    *(products, ops),
    *(reads_of_logits, attention, recurrences, rows_of_a_model, layers),
)
ONLY: Final[dict[str, tuple[Part, ...]]] = {"avxvnni": (products, layers)}


def test_every_test_that_runs_again_exists() -> None:
    """On a CPU without a lesser level only this finds a name that is gone."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module.startswith("test_"):
                assert hasattr(globals()[module], name), f"{module}.{name}"


@pytest.mark.slow  # a library is compiled
@pytest.mark.parametrize(
    ("level", "part"),
    [
        pytest.param(level.name, part, id=f"{level.name}-{part.__name__}")
        for level in levels_here()[1:]
        for part in ONLY.get(level.name, ALL)
    ],
)
def test_the_tests_of_kernels_pass_on_a_lesser_cpu(
    level: str, part: Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, level)
    library = load_library()
    assert library.level.name == level, "a level that cannot be had would test nothing"
    part(native_kernels(library), tmp_path)
