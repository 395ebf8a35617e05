"""Bridges to other libraries, each imported by its own name, so that none is needed by the rest."""
