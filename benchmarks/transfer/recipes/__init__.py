"""How the encoders of the table are made, one recipe each.

``RECIPES[name].make(data_root, folder, seed)`` trains or loads an encoder and gives its feature file.
"""

from __future__ import annotations

from benchmarks.transfer.recipes.cifar10 import CIFAR10, RESNET56
from benchmarks.transfer.recipes.clinc150 import CLINC150
from benchmarks.transfer.recipes.faces import FACES
from benchmarks.transfer.recipes.grey import GREY, OMNIGLOT
from benchmarks.transfer.recipes.minilm import MINILM
from benchmarks.transfer.recipes.recipe import Recipe

__all__ = ["RECIPES", "Recipe"]

_ALL = (*CIFAR10, *RESNET56, *GREY, *FACES, *CLINC150, *OMNIGLOT, *MINILM)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""By the names of their feature files."""
