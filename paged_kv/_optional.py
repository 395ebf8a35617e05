"""Imports what only a part of paged_kv needs, or says which extra brings it."""

import importlib
from types import ModuleType

__all__ = ["optional_import"]


def optional_import(module: str, extra: str) -> ModuleType:
    """Returns the imported `module`, a package of paged_kv's optional dependencies `extra`.

    Raises:
        ImportError: it is not installed; the message holds the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise  # the package is there, and broken: that error tells more
        raise ImportError(f"this needs {package}: run `pip install 'paged_kv[{extra}]'`") from None
