"""Files and other programs: saved posteriors, states, exports, jobs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["jobs", "pretrained", "serving", "states"])
