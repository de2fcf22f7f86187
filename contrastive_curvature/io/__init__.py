"""What is written to disk and read back: saved posteriors, features, states, exports, vector stores, jobs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, ["feature_folder", "jobs", "pretrained", "serving", "states", "stores"]
)
