# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Faces: a network that somebody else trained
#
# The usual case: a pretrained encoder, your own pictures, people whom nobody trained on. MobileFaceNet, from [its ncnn
# port](https://github.com/liguiyuan/mobilefacenet-ncnn), embeds the faces of [Labelled Faces in the
# Wild](http://vis-www.cs.umass.edu/lfw/). Which faces is it unsure of? Does it see that a picture shows no face? Do two
# pictures show one person, and how sure is that?
#
# The posterior of a last layer needs the features before it only. They were computed once, by `python -m
# benchmarks.transfer`, which also blurred, covered and rotated some faces. The posterior is fitted on people of the
# development list; all figures are about the people of the test list.

# %%
import io
import os
import platform
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from laplace import Laplace
from torch import nn

import contrastive_curvature as cc

SMALL = "GALLERY_SMALL" in os.environ  # for the test of this page
DATA = Path(os.environ.get("DATA_ROOT", "../shared/data"))
FEATURES = Path(os.environ.get("FEATURES_ROOT", "../cache/transfer")) / "faces.npz"
HARMS, LEVELS = ("blur", "contrast", "noise", "occlusion", "rotation"), range(1, 6)
data = {
    name: torch.as_tensor(value, dtype=torch.float32 if value.dtype.kind == "f" else None)
    for name, value in np.load(FEATURES).items()
}
print({name: tuple(data[name].shape) for name in ("train_features", "test_features", "pairs_left")})

# %% [markdown]
# ## Fit
#
# The encoder is the last linear layer; its inputs are the features. Half of the people of the test list calibrate the
# p-values, the other half is looked at. Without class centres: the people of the fit are not those who come.

# %%
encoder = nn.Linear(*data["weight"].shape[::-1])
encoder.load_state_dict({name: data[name] for name in ("weight", "bias")})
la = Laplace(encoder, likelihood="contrastive")
la.fit([(data["train_features"], data["train_labels"])])
la.optimize_prior_precision()
la.class_centres = None

people = data["test_labels"].unique()
shuffled = people[torch.randperm(len(people), generator=torch.Generator().manual_seed(0))]
first = torch.isin(data["test_labels"], shuffled[: len(people) // 2])
la.calibrate([data["test_features"][first]])
rows = (~first).nonzero()[:, 0]
faces = la(data["test_features"][rows])
print(
    f"fitted on {len(data['train_labels']):,} pictures of {len(data['train_labels'].unique()):,} people, "
    f"calibrated on {int(first.sum()):,}, looked at {len(rows):,} of others"
)

# %% [markdown]
# ## The most and the least certain faces
#
# Small frontal portraits in even light against profiles, sunglasses, hats, hands, and faces that are cut off.


# %%
def thumbnails():
    """A picture of LFW for each row of the test features."""
    names = (DATA / "lfw-py" / "peopleDevTest.txt").read_text(encoding="utf-8").splitlines()[1:]
    files = [(name, i) for name, count in (line.split() for line in names) for i in range(1, int(count) + 1)]
    archive = zipfile.ZipFile(DATA / "lfw-py" / "lfw-deepfunneled.zip")

    def read(row):
        name, number = files[row]
        picture = plt.imread(io.BytesIO(archive.read(f"lfw-deepfunneled/{name}/{name}_{number:04d}.jpg")), format="jpg")
        return picture[52:191:2, 58:191:2]  # as the network sees it, at half the size

    return read


read = (lambda _row: np.full((56, 56, 3), 200)) if SMALL else thumbnails()
ranked = faces.uncertainty.argsort()
fig, axes = plt.subplots(2, 10, figsize=(8, 2.1), dpi=72)
chosen = (("most certain", ranked[:10]), ("least certain", ranked[-10:].flip(0)))
for line, (title, shown) in zip(axes, chosen, strict=True):
    for axis, row in zip(line, shown, strict=True):
        axis.imshow(read(int(rows[row])))
        axis.set_title(f"{faces.uncertainty[row]:.2f} rad", fontsize=7, pad=2)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    line[0].set_ylabel(title, fontsize=8)
plt.show()

# %% [markdown]
# ## Harm
#
# Some hundred faces were blurred, faded, made noisy, covered and rotated, at five levels. Left: does the uncertainty
# grow with the harm? Right: how often is the nearest other picture still one of the same person?


# %%
def nearest_is_right(embedding, own):
    """Share of pictures whose nearest unharmed picture, not the picture itself, shows the same person."""
    everybody = la(data["test_features"]).mu
    cosines = embedding.mu @ everybody.T
    cosines[torch.arange(len(own)), own] = -2
    return float((data["test_labels"][cosines.argmax(1)] == data["test_labels"][own]).double().mean())


own = data["corrupted_rows"]
fig, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.3))
for kind, mark in zip(HARMS, "osD^v", strict=True):
    levels = [la(data["test_features"][own]), *(la(data[f"corrupted_{kind}_{level}"]) for level in LEVELS)]
    left.plot(range(6), [float(level.uncertainty.median()) for level in levels], f"-{mark}", markersize=4, label=kind)
    right.plot(range(6), [nearest_is_right(level, own) for level in levels], f"-{mark}", markersize=4, label=kind)
left.set(xlabel="level of harm (0: none)", ylabel="median uncertainty, radians")
right.set(xlabel="level of harm (0: none)", ylabel="nearest picture is of the same person", ylim=(0, 1))
left.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## No face at all
#
# Digits of MNIST, letters of Omniglot and photographs of CIFAR-10, given to the network as if they were faces. Each dot
# is a picture; to the left of the line are those that `is_known(0.05)` calls unknown.

# %%
kinds = {
    "faces": faces,
    "digits": la(data["unknown_mnist"]),
    "letters": la(data["unknown_letters"]),
    "photographs": la(data["unknown_cifar10"]),
}
fig, axis = plt.subplots(figsize=(6.8, 2.9))
draw = np.random.default_rng(0)
for place, prediction in enumerate(kinds.values()):
    p = prediction.p_value[:200]
    axis.scatter(p, place + draw.uniform(-0.3, 0.3, len(p)), s=5, alpha=0.5)
    share = float((~prediction.is_known(0.05)).double().mean())
    axis.annotate(f"{share:.0%} called unknown", (1.15, place), va="center", fontsize=9, annotation_clip=False)
axis.axvline(0.05, color="gray", linestyle=":")
axis.annotate("alpha = 0.05", (0.052, 3.55), fontsize=8, color="gray")
axis.set_xscale("log")
axis.set_yticks(range(4), kinds)
axis.set(xlabel="p-value (logarithmic)", xlim=(float(faces.p_value.min()) / 2, 1.1), ylim=(-0.5, 3.9))
plt.show()

# %% [markdown]
# ## The same person?
#
# LFW's list of pairs, half of which show one person. `cc.MatchThreshold` finds the cosine above which a pair counts as
# one person, so that at most one in a hundred pairs of two people does. Of the ten folds, eight fit the threshold that
# is judged on the other two, five times. Then the decisions that are least sure are left to a person: those near the
# threshold, or those with an uncertain picture.

# %%
left, right = (la(data["pairs_features"][data[f"pairs_{side}"]]) for side in ("left", "right"))
same, cosine = data["pairs_same"].bool(), (left.mu * right.mu).sum(1)
decided, near = torch.zeros_like(same), torch.zeros_like(cosine)
for part in range(5):
    held = data["pairs_fold"] % 5 == part  # two folds of ten
    limit = cc.MatchThreshold(false_match_rate=0.01).fit(cosine[~held], same[~held])
    decided[held] = limit.same(cosine[held])
    near[held] = -(cosine[held] - limit.threshold).abs()
print(limit)
print(f"of other pairs, {decided[~same].double().mean():.2%} of two people count as the same,", end=" ")
print(f"and {(~decided[same]).double().mean():.2%} of one person are missed")

fig, (axis, other) = plt.subplots(1, 2, figsize=(8.4, 3.5))
for kind, name in ((True, "one person"), (False, "two people")):
    axis.hist(cosine[same == kind], torch.linspace(-0.4, 1, 50), alpha=0.6, label=name)
axis.axvline(limit.threshold, color="gray", linestyle=":")
axis.set(xlabel="cosine of a pair", ylabel="pairs")
axis.legend(frameon=False, fontsize=8)
scores = {"nearest to the threshold": near, "largest uncertainty": torch.maximum(left.uncertainty, right.uncertainty)}
for (name, score), style in zip(scores.items(), ("-", "--"), strict=True):
    curve = cc.metrics.sparsification_curve(score, (decided != same).float())
    other.plot(curve.removed, 100 * curve.performance, style, label=name)
other.set(xlabel="share of the pairs left to a person", ylabel="wrong decisions among the rest, %", xlim=(0, 0.3))
other.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# More: [two inputs: same or not?](../decide.html#two-inputs-same-or-not), [pairs of
# faces](../statistics.html#pairs-of-faces), and [results on many encoders](../results.html#does-the-answer-transfer).

# %%
info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.processor())
print(f"All numbers of this page are computed in it, on: {cpu}, {torch.get_num_threads()} thread(s),")
print(f"torch {torch.__version__}, Python {platform.python_version()}")
