"""Files and other programs: saved posteriors, features, states, exports, indices of galleries, jobs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, ["feature_folder", "indexes", "jobs", "pretrained", "serving", "states"]
)
