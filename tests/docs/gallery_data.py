"""Small data in the files that two pages of the gallery read."""

import gzip
import json
import random
from pathlib import Path

import numpy as np

INTENTS = ["my account balance", "the weather today", "a train to town", "an alarm for six", "this song again"]
INTENTS += ["the light upstairs", "a table for two", "my last messages"]
BEYOND = ["a recipe with beans", "the capital of Peru", "how old cats get", "who won the cup"]


def write_queries(path: Path) -> None:
    """Write queries of eight intents, and of others, in the format of CLINC150."""
    draw = random.Random(0)

    def queries(size, intents):
        asked = [intents[k % len(intents)] for k in range(size)]
        verbs, starts = ["show", "tell", "give", "find", "send", "read", "play"], ["please", "can you", "could you"]
        return [
            [f"{draw.choice(starts)} {draw.choice(verbs)} me {about} in {draw.randrange(999)} minutes", about]
            for about in asked
        ]

    sizes = {"train": (320, INTENTS), "val": (240, INTENTS), "test": (240, INTENTS), "oos_test": (200, BEYOND)}
    content = {part: queries(*size) for part, size in sizes.items()}
    path.parent.mkdir()
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


def write_faces(path: Path) -> None:
    """Write points around one centre for each of many people, in place of the features of LFW."""
    draw = np.random.default_rng(0)
    people = 3 * draw.standard_normal((90, 32))

    def pictures(who, blur=0.0):
        return ((1 - blur) * people[who] + draw.standard_normal((len(who), 32))).clip(0)

    who = {"train": np.arange(300) % 40, "test": 40 + np.arange(240) % 50}
    data = {f"{part}_features": pictures(rows) for part, rows in who.items()}
    data |= {f"{part}_labels": rows for part, rows in who.items()}
    data |= {"weight": draw.standard_normal((16, 32)) / 6, "bias": np.zeros(16), "corrupted_rows": np.arange(60)}
    data |= {f"unknown_{name}": draw.standard_normal((50, 32)).clip(0) for name in ("mnist", "letters", "cifar10")}
    for kind in ("blur", "contrast", "noise", "occlusion", "rotation"):
        data |= {f"corrupted_{kind}_{level}": pictures(who["test"][:60], level / 6) for level in range(1, 6)}
    left, right = draw.integers(0, 240, (2, 400))
    right[:200] = (left[:200] + 50) % 240
    data |= {"pairs_features": data["test_features"], "pairs_left": left, "pairs_right": right}
    data |= {"pairs_same": who["test"][left] == who["test"][right], "pairs_fold": np.arange(400) % 10}
    np.savez(path, **data)
