"""Programs on top of the library: the command line, and the report of an evaluation."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["cli", "report"])
