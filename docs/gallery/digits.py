# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A tour on handwritten digits
#
# From a small encoder to scores that can be trusted, in one page: train an encoder, fit its posterior, look at the
# pictures that it is most and least sure of, tell digits that it has never seen, and give each answer a probability.
#
# The data are scikit-learn's digits, 1,797 pictures of 8 x 8 pixels. The encoder learns the digits 0 to 7. Digits 8 and
# 9 are kept away from it: they play the unknown kind of input that turns up after the training.

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
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

SMALL = "GALLERY_SMALL" in os.environ  # for the test of this page
torch.manual_seed(0)

pictures, digits = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
pictures = pictures.float() / 16
known, unknown = pictures[digits < 8], pictures[digits >= 8]
labels = digits[digits < 8].long()
order = torch.randperm(len(known))
train, validation, test = order[:500], order[500:900], order[900:]


def loader(rows):
    return DataLoader(TensorDataset(known[rows], labels[rows]), batch_size=250, shuffle=True)


print(
    f"known digits: {len(train)} for training, {len(validation)} for validation, "
    f"{len(test)} for the test; unknown: {len(unknown)}"
)

# %% [markdown]
# ## Train an encoder
#
# Any encoder and any way of training will do. Here: two layers, the contrastive loss with its margin of 0.7, Adam.

# %%
encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
loss = cc.ContrastiveLoss(margin=0.7, normalization="type")
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
for _epoch in range(5 if SMALL else 30):
    for x, y in loader(train):
        optimizer.zero_grad()
        loss(encoder(x), y).backward()
        optimizer.step()

# %% [markdown]
# ## Fit the posterior
#
# Four lines. `fit` reads the training data, `optimize_prior_precision` chooses the prior in closed form, and
# `calibrate` takes known pictures that the encoder was not trained on, without their labels.

# %%
la = Laplace(encoder, likelihood="contrastive")
la.fit(loader(train))
la.optimize_prior_precision()
la.calibrate(loader(validation))

embedding = la(known[test])
gallery = la(known[train])
found = cc.metrics.nearest_neighbors(embedding.mu, k=1, gallery=gallery.mu)[:, 0]
right = labels[train][found] == labels[test]
print(f"nearest training picture is of the same digit: {right.float().mean():.1%} of {len(test)} test pictures")

# %% [markdown]
# ## Which pictures is it sure of?
#
# `uncertainty` is the angle, in radians, by which a network drawn from the posterior typically turns an embedding.
# These are the test pictures with the smallest and the largest. Above each: its digit, and the digit of its nearest
# training picture, where that is another one.

# %%
ranked = embedding.uncertainty.argsort()
fig, axes = plt.subplots(4, 10, figsize=(8, 3.9))
for rows, half, title in ((ranked[:20], axes[:2], "most certain"), (ranked[-20:].flip(0), axes[2:], "least certain")):
    for axis, row in zip(half.flat, rows, strict=True):
        truth, answer = int(labels[test][row]), int(labels[train][found[row]])
        axis.imshow(known[test][row].view(8, 8), cmap="gray_r")
        axis.set_title(
            str(truth) if truth == answer else f"{truth}, taken for {answer}",
            fontsize=8,
            color="black" if truth == answer else "#c85200",
        )
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    half[0, 0].set_ylabel(title, y=-0.1, fontsize=9)
plt.show()

# %% [markdown]
# ## May we trust the answers that it is sure of?
#
# Sort the test pictures by a score, keep the most certain share, and count how many of their nearest neighbours are
# right. A useful score climbs towards the left. The line of chance is the accuracy of all.

# %%
scores = {
    "uncertainty": embedding.uncertainty,
    "minus the norm of the raw output": -encoder(known[test]).detach().norm(dim=1),
}
fig, axis = plt.subplots(figsize=(6.4, 3.4))
for (name, score), style in zip(scores.items(), ("-", "--"), strict=True):
    curve = cc.metrics.sparsification_curve(score, right.float())
    axis.plot(1 - curve.removed[:-20], curve.performance[:-20], style, label=f"kept by {name}")
axis.axhline(right.float().mean(), color="gray", linestyle=":", label="kept at random")
axis.set(xlabel="share of the test pictures that is kept, the most certain first", ylabel="share of right neighbours")
axis.legend(frameon=False)
plt.show()
for name, score in scores.items():
    print(f"AUROC of {name}, wrong against right neighbours: {cc.metrics.auroc(score[right], score[~right]):.3f}")

# %% [markdown]
# ## Digits that it has never seen
#
# `p_value` is the share of known pictures that are at least as unusual as this one. Of known pictures it is uniform,
# whatever the encoder; the share of false alarms scatters around alpha from one set of validation pictures to the next
# ([by how much](../statistics.html#p-values)). Of unknown pictures the p-value should be small. How small,
# nothing can promise: digits 8 and 9 look much like the others.

# %%
strange = la(unknown)
fig, (left, middle) = plt.subplots(1, 2, figsize=(8, 3.2))
bins = np.linspace(0, 1, 21)
for p, name, style in ((embedding.p_value, "digits 0 to 7", {}), (strange.p_value, "digits 8 and 9", {"hatch": "//"})):
    left.hist(p, bins=bins, weights=np.full(len(p), 1 / len(p)), alpha=0.6, label=name, **style)
left.set(xlabel="p-value", ylabel="share of the pictures")
left.legend(frameon=False)
alphas = np.linspace(0.005, 0.3, 60)
middle.plot(alphas, [(embedding.p_value <= a).double().mean() for a in alphas], label="digits 0 to 7: false alarms")
middle.plot(alphas, [(strange.p_value <= a).double().mean() for a in alphas], "--", label="digits 8 and 9: found")
middle.plot(alphas, alphas, ":", color="gray", label="false alarms as promised")
middle.set(xlabel="alpha, which you choose", ylabel="share called unknown", ylim=(0, 1.45))
middle.set_yticks(np.linspace(0, 1, 6))
middle.legend(frameon=False, fontsize=8, loc="upper left")
plt.show()
for alpha in (0.01, 0.05, 0.1):
    flagged = [float((~prediction.is_known(alpha)).double().mean()) for prediction in (embedding, strange)]
    print(f"alpha = {alpha}: called unknown are {flagged[0]:.1%} of the digits 0 to 7, {flagged[1]:.1%} of 8 and 9")

# %% [markdown]
# ## The probability that an answer is right
#
# `cc.Retriever` turns a search into answers, each with the probability that it is right. It learns from labelled
# validation pictures, among them some whose digit is not in the gallery: here half of the 8s and 9s. It is judged on
# the other half and the test pictures. Below, pictures are put into groups by their probability; in each, the share of
# right answers should be that probability.

# %%
half = len(unknown) // 2
absent = torch.full((half,), -1)  # a label that the gallery does not have


def ask(rows, others):
    return torch.cat([known[rows], others]), torch.cat([labels[rows], absent[: len(others)]])


retriever = cc.Retriever(la, wrong_answers=0.1, false_matches=None, false_alarms=None)
retriever.fit(gallery=(known[train], labels[train]), held_out=ask(validation, unknown[:half]))
print(retriever)
queries, truth = ask(test, unknown[half : 2 * half])
answers = retriever(queries)
correct = torch.from_numpy(answers.label == truth.numpy()).double()
confidence = torch.from_numpy(answers.confidence)
group = torch.bucketize(confidence, torch.linspace(0, 1, 6, dtype=torch.float64)[1:-1])
fig, axis = plt.subplots(figsize=(4.6, 3.6))
axis.plot([0, 1], [0, 1], ":", color="gray", label="perfect")
inside = [group == i for i in range(5) if (group == i).sum() >= 5]
means = [float(confidence[rows].mean()) for rows in inside]
shares = [float(correct[rows].mean()) for rows in inside]
errors = [float((correct[rows].mean() * (1 - correct[rows].mean()) / rows.sum()).sqrt()) for rows in inside]
axis.errorbar(means, shares, errors, fmt="o", capsize=3, label="test pictures, with standard errors")
for x, y, rows in zip(means, shares, inside, strict=True):
    axis.annotate(f"{int(rows.sum())}", (x, y), textcoords="offset points", xytext=(8, -10), fontsize=8)
axis.set(xlabel="confidence", ylabel="share of right answers", xlim=(0, 1), ylim=(0, 1.05))
axis.legend(frameon=False)
plt.show()
answered = torch.from_numpy(answers.decision == "answer")
print(
    f"Brier score {((confidence - correct) ** 2).mean():.3f}; "
    f"of a constant guess {correct.mean() * (1 - correct.mean()):.3f}\n"
    f"answered are {answered.double().mean():.1%} of these pictures, {1 - correct[answered].mean():.1%} of them wrongly"
)

# %% [markdown]
# ## Where to go from here
#
# The same lines work for your encoder: see [what to type](../recipes/encoders.html).
# [Decide](../decide.html) states the errors, and [the statistics](../statistics.html) has the methods.


# %%
info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.processor())
print(f"All numbers of this page are computed in it, on: {cpu}, {torch.get_num_threads()} thread(s),")
print(f"torch {torch.__version__}, Python {platform.python_version()}")
