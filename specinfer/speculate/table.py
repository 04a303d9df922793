"""The speculators an engine has besides its drafts: a new one is added here, its options to config.py.

Draft models are not among them: they are loaded with the target (engine/build.py), and asked after all of
these; then come a caller's own.
"""

from __future__ import annotations

import logging

from specinfer.errors import KernelBuildError
from specinfer.kernels.library import Library
from specinfer.kernels.native import load_library
from specinfer.progress import Progress
from specinfer.speculate.grammar import GrammarSpeculator
from specinfer.speculate.lookups.lookup import LookupOptions, LookupSpeculator
from specinfer.speculate.lookups.prediction import PredictionSpeculator
from specinfer.speculate.speculator import Speculator
from specinfer.speculation_config import SpeculationConfig

_LOG = logging.getLogger(__name__)


def build_speculators(
    config: SpeculationConfig, library: Library | None = None, progress: Progress | None = None
) -> list[Speculator]:
    """Those that the config asks for, in the order they are asked.

    They are asked before the drafts: they cost next to nothing, and what they know says whether a draft's
    pass is worth it. Surest first, as of equal guesses the first are verified. `library` looks guesses up;
    where the models run without one, it is loaded for that alone. Raises KernelBuildError where lookups are
    asked for and none can be had; lookups that are "auto" are left off then, with a warning.
    """
    speculators: list[Speculator] = [
        GrammarSpeculator(depth=config.forced_depth or 16),
        PredictionSpeculator(depth=config.prediction_depth or 15, branches=config.prediction_branches),
    ]
    if config.lookup:
        library = library or _library_for_lookups(config, progress)
    if config.lookup and library is not None:
        options = LookupOptions(
            min_match=config.lookup_min,
            max_depth=config.lookup_depth or 16,
            max_nodes=config.lookup_nodes or 32,
            memory=config.lookup_memory,
        )
        speculators.append(LookupSpeculator(library, options, verifier=config.verifier))
    return speculators


def _library_for_lookups(config: SpeculationConfig, progress: Progress | None) -> Library | None:
    try:
        return load_library(progress)
    except KernelBuildError as error:
        if config.lookup != "auto":
            raise KernelBuildError(
                f"lookup is {config.lookup}, and needs native kernels: {error}; or leave lookups off: "
                "lookup=False, --no-lookup"
            ) from None
        _LOG.warning("no guesses are looked up, as that needs native kernels: %s", error)
        return None
