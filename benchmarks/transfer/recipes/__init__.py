"""How the encoders of the table are made: ``RECIPES[name]`` is a title, and a function that gives the feature file.

It is called with the data root, a folder for what is worth keeping between encoders, and a seed, and gives the same
features for the same seed on the same machine.
"""

from __future__ import annotations

from benchmarks.transfer.recipes.cifar10 import CIFAR10, RESNET56
from benchmarks.transfer.recipes.clinc150 import CLINC150, MINILM
from benchmarks.transfer.recipes.faces import FACES
from benchmarks.transfer.recipes.image_encoder import GREY, OMNIGLOT

RECIPES = CIFAR10 | RESNET56 | GREY | FACES | CLINC150 | OMNIGLOT | MINILM
"""By the names of their feature files, without their ending."""
