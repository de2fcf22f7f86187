# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Two towers: pictures and captions
#
# CLIP in small. One encoder embeds pictures of digits, another one captions such as "a bold seven", and both meet on
# one sphere. Then a picture is classified by prompts alone, "a seven", and both, picture and prompt, know how sure they
# are.

# %%
import os
import platform
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import nll_loss

import contrastive_curvature as cc

SMALL = "GALLERY_SMALL" in os.environ  # for the test of this page

# %% [markdown]
# ## The pairs
#
# Pictures of scikit-learn's digits, and captions that say which digit it is, how strong the strokes are (by the sum of
# the pixels), and sometimes only one of the two. Many pictures share a caption, so a batch has many right answers for
# each picture.

# %%
torch.manual_seed(0)
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
pictures, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
pictures = pictures.float() / 16
ink = pictures.sum(1)
thirds = ink.quantile(torch.tensor([1 / 3, 2 / 3]))
stroke = torch.bucketize(ink, thirds)
STROKES = ["light", "plain", "bold"]
WORDS = {word: number for number, word in enumerate(["a", "an", "digit", *NAMES, *STROKES])}


def captions_of(rows):
    texts = []
    for row, kind in zip(rows.tolist(), torch.rand(len(rows)).tolist(), strict=True):
        digit, weight = NAMES[digits[row]], STROKES[stroke[row]]
        texts.append(f"a {weight} {digit}" if kind < 0.6 else f"a {digit}" if kind < 0.9 else f"a {weight} digit")
    return texts


def tokens_of(texts):
    """Counts of the known words, (N, W); other words are left out."""
    found = torch.zeros(len(texts), len(WORDS))
    for row, text in enumerate(texts):
        for word in text.split():
            if word in WORDS:
                found[row, WORDS[word]] += 1
    return found


order = torch.randperm(len(pictures))
train, validation, test = order[:900], order[900:1300], order[1300:]
fig, axes = plt.subplots(1, 6, figsize=(8, 1.7))
for axis, row, text in zip(axes, train[:6], captions_of(train[:6]), strict=True):
    axis.imshow(pictures[row].view(8, 8), cmap="gray_r")
    axis.set_title(text, fontsize=9)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## Train both towers
#
# With a supervised contrastive loss between the towers: a picture belongs to all captions of its batch that are true of
# it, which is approximated here by the digit. `cc.SupConLoss(...).between(a, b, (labels_a, labels_b))` is that loss.
# Captions that name no digit are left to themselves: each has a label of its own.

# %%
towers = cc.TwoTowers(
    nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)),
    nn.Sequential(nn.Linear(len(WORDS), 64), nn.ReLU(), nn.Linear(64, 16)),
)
TEMPERATURE = 0.1
loss = cc.SupConLoss(TEMPERATURE)


def pairs(rows, batch=300):
    """Batches (pictures, captions, labels of both)."""
    for chosen in rows[torch.randperm(len(rows))].split(batch):
        texts = captions_of(chosen)
        named = torch.tensor([not text.endswith("digit") for text in texts])
        labels = digits[chosen].long()
        nobody = 100 + torch.arange(len(chosen))
        yield pictures[chosen], tokens_of(texts), (labels, torch.where(named, labels, nobody))


optimizer = torch.optim.Adam(towers.parameters(), lr=3e-3)
for _epoch in range(3 if SMALL else 40):
    for a, b, labels in pairs(train):
        optimizer.zero_grad()
        loss.between(*towers(a, b), labels).backward()
        optimizer.step()

# %% [markdown]
# ## One fit for both posteriors

# %%
la = Laplace(towers, likelihood="contrastive", backend_kwargs={"loss": loss})
la.fit(list(pairs(train)))
la.optimize_prior_precision()
la.a.calibrate([pictures[validation]])

prompts = [f"a {name}" for name in NAMES]
image, prompt = la.a(pictures[test]), la.b(tokens_of(prompts))
right = (image.mu @ prompt.mu.T).argmax(1) == digits[test]
print(f"zero-shot: {right.double().mean():.1%} of {len(test)} test pictures are nearest to the prompt of their digit")

# %% [markdown]
# ## Which prompts say enough?
#
# The text tower is uncertain, too. A prompt without the name of a digit ("a digit", "a bold digit"), or with words that
# the tower has never read together, should be less certain than "a seven". Blue: prompts that name one digit, as the
# captions do; orange: the others.

# %%
asked = [
    "a seven",
    "a bold seven",
    "a three",
    "a light three",
    "a digit",
    "a bold digit",
    "a bold light digit",
    "seven three",
    "zero nine",
]
spread = la.b(tokens_of(asked)).uncertainty
fig, axis = plt.subplots(figsize=(6.4, 3))
colours = ["C0" if any(name in text for name in NAMES) and text.startswith("a") else "C1" for text in asked]
axis.barh(asked[::-1], spread.flip(0), color=colours[::-1])
axis.set(xlabel="uncertainty of the prompt, radians")
plt.show()

# %% [markdown]
# ## A cosine with error bars
#
# For two test pictures, the cosines to the ten prompts, with two standard deviations that come from both posteriors:
# the test picture of which the image tower is most certain, and the one of which it is least certain.

# %%
cosine = cc.similarity(image, prompt, pairwise=True)
fig, axes = plt.subplots(1, 4, figsize=(8.4, 3), width_ratios=[1, 3, 1, 3])
chosen = [int(image.uncertainty.argmin()), int(image.uncertainty.argmax())]
for (shown, axis), row, name in zip((axes[:2], axes[2:]), chosen, ("most certain", "least certain"), strict=True):
    shown.imshow(pictures[test][row].view(8, 8), cmap="gray_r")
    shown.set_title(f"{name}:\n{NAMES[digits[test][row]]}", fontsize=9)
    shown.axis("off")
    axis.errorbar(cosine.mean[row], range(10), xerr=2 * cosine.std[row], fmt="o", capsize=3)
    axis.set_yticks(range(10), NAMES)
    axis.set(xlabel="cosine to the prompt", xlim=(-1.1, 1.1))
    axis.invert_yaxis()
plt.show()

# %% [markdown]
# ## Probabilities under harm
#
# Cover more and more of each picture. The classifier gets worse; do its probabilities say so?
# The softmax of the cosines, averaged over samples of the uncertain picture and of the uncertain prompts, is beside the
# plain softmax of the mean directions, which one would take without a posterior. Both get one temperature from
# validation pictures, half of which are covered in part.


# %%
def cover(rows, lines):
    """The lower lines of the pictures are white."""
    harmed = pictures[rows].view(-1, 8, 8).clone()
    if lines:
        harmed[:, -lines:] = 0
    return harmed.flatten(1)


levels = range(0, 7)
seen = torch.cat(
    [cover(validation[:200], 0), *(cover(validation[200 + 50 * i : 250 + 50 * i], i + 1) for i in range(4))]
)
WAYS = {"integrated over both posteriors": lambda e: e.sample(200), "of the means only": lambda e: e.mu.unsqueeze(0)}


def logits(way, embeddings):
    """Scaled cosines to the prompts, for each sample: (S, N, 10)."""
    return WAYS[way](embeddings) @ WAYS[way](prompt).mT / TEMPERATURE


def probabilities(way, embeddings):
    return (logits(way, embeddings) / temperature[way]).softmax(2).mean(0)


temperature, tried = {}, torch.logspace(-1, 1, 81)
for way in WAYS:
    found = logits(way, la.a(seen))
    costs = [float(nll_loss((found / t).softmax(2).mean(0).log(), digits[validation].long())) for t in tried]
    temperature[way] = float(tried[np.argmin(costs)])
rows = []
for lines in levels:
    harmed = la.a(cover(test, lines))
    both = [probabilities(way, harmed) for way in WAYS]
    correct = [p.argmax(1) == digits[test] for p in both]
    rows.append(
        [
            float(correct[0].double().mean()),
            *(float(p.max(1).values.mean()) for p in both),
            float(harmed.uncertainty.median()),
            float((~harmed.is_known(0.05)).double().mean()),
        ]
    )
accuracy, integrated, of_means, uncertainty, flagged = np.array(rows).T
fig, axes = plt.subplots(1, 3, figsize=(8.6, 3))
axes[0].plot(levels, accuracy, "k-o", markersize=4, label="share of right answers")
axes[0].plot(levels, integrated, "--s", markersize=4, label="mean confidence, integrated")
axes[0].plot(levels, of_means, ":^", markersize=4, label="mean confidence, means only")
axes[0].set(ylim=(0, 1.38), yticks=np.linspace(0, 1, 6), ylabel="share, probability")
axes[0].legend(frameon=False, fontsize=7.5)
axes[1].plot(levels, uncertainty, "-o", markersize=4)
axes[1].set(ylabel="median uncertainty, radians", ylim=(0, None))
axes[2].plot(levels, flagged, "-o", markersize=4)
axes[2].axhline(0.05, color="gray", linestyle=":", label="alpha = 0.05")
axes[2].set(ylabel="share called unknown", ylim=(0, 1.02))
axes[2].legend(frameon=False, fontsize=8, loc="center right")
for axis in axes:
    axis.set_xlabel("covered lines of 8")
plt.show()
for way in WAYS:
    brier = []
    for lines in levels:
        p = probabilities(way, la.a(cover(test, lines)))
        brier.append(float((p.max(1).values - (p.argmax(1) == digits[test]).double()).square().mean()))
    print(f"Brier score of the confidence, {way}, by covered lines: " + ", ".join(f"{value:.3f}" for value in brier))

# %% [markdown]
# The integral changes the confidence by little here: the error bars of the cosines are small against what one
# temperature, fitted on whole and covered pictures together, does to all of them. It leaves the confidence too low for
# whole pictures and too high for covered ones. What sees the harm is the uncertainty and the p-value: reject by these
# first, and classify what is left.

# %%
kept_right, kept = [], []
for lines in levels:
    harmed = la.a(cover(test, lines))
    known = harmed.is_known(0.05)
    kept.append(float(known.double().mean()))
    right = (harmed.mu @ prompt.mu.T).argmax(1) == digits[test]
    kept_right.append(float(right[known].double().mean()) if known.any() else float("nan"))
for lines, share, accuracy_of_kept in zip(levels, kept, kept_right, strict=True):
    of_kept = f"{accuracy_of_kept:.1%} of them right" if share else "none to judge"
    print(
        f"{lines} lines covered: {share:6.1%} kept at alpha = 0.05, {of_kept}; of all, {accuracy[lines]:.1%} are right"
    )

# %% [markdown]
# With your own CLIP: [open_clip](../recipes/encoders.html#open_clip), [two towers](../clip.html).


# %%
info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.processor())
print(f"All numbers of this page are computed in it, on: {cpu}, {torch.get_num_threads()} thread(s),")
print(f"torch {torch.__version__}, Python {platform.python_version()}")
