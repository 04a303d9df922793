"""Speculators of an engine other than drafts; a new one is added here, and its options to its config.

Drafts are loaded with the target (engine/build.py) and run after these; a caller's speculators run last.
"""

import logging

from specinfer.errors import KernelBuildError
from specinfer.kernels.library import Library, load_library
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
    """Return the configured speculators, in the order in which they run.

    They run before the drafts: they cost almost nothing, and their guesses determine the worth of a draft's
    pass. The most reliable comes first, as of equally likely guesses the first are verified. `library` has
    the native look-up; it is loaded here if the models run without it. Raises KernelBuildError if `lookup` is
    True and the library is not available; with "auto" the lookup is then off, with a warning.
    """
    speculators: list[Speculator] = [
        GrammarSpeculator(depth=config.lookup_depth or 16),
        PredictionSpeculator(depth=config.lookup_depth or 15),
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
        _LOG.warning("lookup is off, as it needs native kernels: %s", error)
        return None
