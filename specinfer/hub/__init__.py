"""Find, download and check the files of a model."""

from specinfer.hub.catalogue import CATALOGUE, CatalogueEntry
from specinfer.hub.model_files import ModelFiles
from specinfer.hub.resolution import resolve

__all__ = ["CATALOGUE", "CatalogueEntry", "ModelFiles", "resolve"]
