"""Files and other programs: saved posteriors, features, states, exports, jobs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, ["feature_folder", "jobs", "pretrained", "serving", "states"]
)
