# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Text: queries that nobody planned for
#
# An assistant knows 150 intents: "what is my balance", "translate hello into French". It answers a query by the intent
# of the nearest query that it was trained on. What about "how long do cats live"? This page trains a small encoder of
# texts on [CLINC150](https://github.com/clinc/oos-eval) (CC BY 3.0), whose 1,000 out-of-scope queries were written by
# people, and asks three things: Is this query of a kind that the assistant knows? Is the answer right? How sure is
# that?

# %%
import os
import platform
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from benchmarks.transfer.recipes.queries import read_queries
from benchmarks.transfer.recipes.text_encoder import make_text_encoder, parts_of
from benchmarks.transfer.train import Training, train

SMALL = "GALLERY_SMALL" in os.environ  # for the test of this page
DATA = Path(os.environ.get("DATA_ROOT", "../shared/data"))
queries = read_queries(DATA)
texts, beyond = queries.texts, queries.beyond
labels = {part: torch.as_tensor(numbers) for part, numbers in queries.labels.items()}
print({part: len(found) for part, found in texts.items()}, "out of scope:", len(beyond))

# %% [markdown]
# ## The encoder
#
# Vectors of words, of pairs of words and of runs of letters, averaged, then two layers: small, fast, and trained here
# from nothing with the supervised contrastive loss. Yours may be a transformer; what follows is the same
# ([what to type](../recipes/encoders.html)).

# %%
torch.manual_seed(0)
inputs = {part: parts_of(found) for part, found in texts.items()}
inputs["beyond"] = parts_of(beyond)
encoder = make_text_encoder(dim=64)
how = Training(epochs=2, batch=64, together=4) if SMALL else Training(epochs=15, rate=3e-3, batch=256, together=4)
losses = train(encoder, lambda rows: inputs["train"][rows], labels["train"], "supcon", how, seed=0)
print(f"loss of the first epoch {losses[0]:.2f}, of the last {losses[-1]:.2f}")

# %% [markdown]
# ## The posterior
#
# The validation queries are known ones that the encoder was not trained on: they calibrate the p-values. No
# out-of-scope query is used.

# %%
la = Laplace(encoder, likelihood="contrastive", backend_kwargs={"loss": cc.SupConLoss(0.1)})
la.fit(DataLoader(TensorDataset(inputs["train"], labels["train"]), batch_size=1000, shuffle=True))
la.optimize_prior_precision()
la.calibrate(DataLoader(TensorDataset(inputs["val"], labels["val"]), batch_size=1000))

gallery, validation, test, strange = (la(inputs[part]) for part in ("train", "val", "test", "beyond"))


def answers(embedding):
    """Position of the nearest training query, and the cosine to it."""
    found = cc.metrics.nearest_neighbors(embedding.mu, gallery.mu, k=1)[:, 0]
    return found, (embedding.mu * gallery.mu[found]).sum(1)


found, cosine = answers(test)
found_strange, cosine_strange = answers(strange)
right = labels["train"][found] == labels["test"]
print(f"intent of the nearest training query is right: {right.double().mean():.1%} of {len(right):,} test queries")

# %% [markdown]
# ## Is this query of a kind that it knows?
#
# Left: four scores, and how well each tells out-of-scope queries from test queries (AUROC: the probability that an
# out-of-scope query has the larger score; 0.5 is chance). `1 - cosine` to the nearest training query needs all of them
# at hand; `novelty` needs none. Right: the p-value turned into a decision, with the share of false alarms that you
# choose.

# %%
scores = {
    "novelty": (test.novelty, strange.novelty),
    "1 - cosine to the nearest": (1 - cosine, 1 - cosine_strange),
    "uncertainty": (test.uncertainty, strange.uncertainty),
    "minus the norm of the output": (-test.raw_mean.norm(dim=1), -strange.raw_mean.norm(dim=1)),
}
aurocs = {name: cc.metrics.auroc(*pair) for name, pair in scores.items()}
fig, (left, middle) = plt.subplots(1, 2, figsize=(8.6, 3.2))
bars = left.barh(list(aurocs)[::-1], list(aurocs.values())[::-1], color=["C7", "C7", "C7", "C0"])
left.bar_label(bars, fmt="%.3f", padding=3)
left.axvline(0.5, color="gray", linestyle=":")
left.set(xlim=(0.4, 1.05), xlabel="AUROC, out of scope against test")
alphas = np.linspace(0.005, 0.3, 60)
for prediction, name, style in ((test, "test queries: false alarms", "-"), (strange, "out of scope: found", "--")):
    middle.plot(alphas, [float((prediction.p_value <= a).double().mean()) for a in alphas], style, label=name)
middle.plot(alphas, alphas, ":", color="gray", label="false alarms as promised")
middle.set(xlabel="alpha, which you choose", ylabel="share called unknown", ylim=(0, 1.45), yticks=np.linspace(0, 1, 6))
middle.legend(frameon=False, fontsize=8, loc="upper left")
plt.show()
for alpha in (0.01, 0.05, 0.1):
    print(
        f"alpha = {alpha}: called unknown are {(~test.is_known(alpha)).double().mean():.1%} of the test queries "
        f"and {(~strange.is_known(alpha)).double().mean():.1%} of those out of scope"
    )

# %% [markdown]
# On these queries the uncertainty and the cosine tell out-of-scope queries better than `novelty`, which the p-value is
# made of; on other encoders it is the other way round ([a comparison](../results.html#does-the-answer-transfer)).
#
# Some of the queries. Out-of-scope queries with a large p-value look like known ones to this encoder, which sees words
# and not meaning.


# %%
def show(title, rows, part, prediction):
    print(title)
    for row in rows.tolist():
        print(f"  p = {prediction.p_value[row]:.3f}  {part[row]}")


show("Out of scope, found first:", strange.novelty.argsort(descending=True)[:6], beyond, strange)
show("Out of scope, taken for known:", strange.novelty.argsort()[:6], beyond, strange)
show("In scope, called unknown:", test.novelty.argsort(descending=True)[:6], texts["test"], test)

# %% [markdown]
# ## Which answers to give?
#
# Now both kinds of queries come together, test queries and those out of scope, for which any answer is wrong.
# `cc.Retriever` learns from labelled queries what speaks for an answer: the cosines, whether the neighbours agree, the
# uncertainty and the novelty. Some of them have to be without an answer: here it is the validation queries and a fifth
# of the out-of-scope ones, about as many in a hundred as in the rest, on which it is judged. Of its answers, at most a
# tenth is to be wrong.
#
# Below, sort the queries by a score, answer only the most certain share, and count the right answers.

# %%
part = len(beyond) // 5
absent = torch.full((len(beyond),), -1)
every = torch.randperm(len(labels["val"]), generator=torch.Generator().manual_seed(0))[: len(labels["test"]) // 4]
held = torch.cat([inputs["val"][every], inputs["beyond"][:part]])
held_labels = torch.cat([labels["val"][every], absent[:part]])
asked = torch.cat([inputs["test"], inputs["beyond"][part:]])
truth = torch.cat([labels["test"], absent[part:]])

retriever = cc.Retriever(la, wrong_answers=0.1, false_matches=None, false_alarms=None)
retriever.fit(gallery=(inputs["train"], labels["train"]), held_out=(held, held_labels), progress_bar=False)
print(retriever)
answer = retriever(asked)
correct = torch.from_numpy(answer.label == truth.numpy()).float()
answered = torch.from_numpy(answer.decision == "answer")
print(
    f"answered are {answered.double().mean():.1%} of these queries, {1 - correct[answered].mean():.1%} of them wrongly"
)

whole = la(asked)
both = {
    "1 - confidence": 1 - torch.from_numpy(answer.confidence),
    "1 - cosine to the nearest": 1 - answers(whole)[1],
    "novelty": whole.novelty,
    "uncertainty": whole.uncertainty,
}
best = float(correct.mean())
fig, axis = plt.subplots(figsize=(6.6, 3.8))
for (name, score), style in zip(both.items(), ("-", "--", "-.", ":"), strict=True):
    curve = cc.metrics.sparsification_curve(score, correct)
    axis.plot(
        1 - curve.removed[:-50],
        curve.performance[:-50],
        style,
        label=f"{name} (area {cc.metrics.ausc(score, correct):.3f})",
    )
kept = np.linspace(0.02, 1, 100)
axis.plot(kept, np.minimum(1, best / kept), color="black", linewidth=0.8, label="the best possible")
axis.set(xlabel="share of the queries that is answered, the most certain first", ylabel="share of right answers")
axis.legend(frameon=False, fontsize=8, loc="lower left")
plt.show()

# %% [markdown]
# ## How sure is that?
#
# The confidence of an answer is the probability that it is right. Beside it that of a retriever without a posterior,
# which has the cosines alone. Here they are the same: with the gallery at hand, the retriever gives the uncertainty and
# the novelty of this encoder no weight.

# %%
plain = cc.Retriever(None, wrong_answers=0.1, false_matches=None, false_alarms=None)
plain.fit(gallery=(gallery.mu, labels["train"]), held_out=(la(held).mu, held_labels), progress_bar=False)
fig, axis = plt.subplots(figsize=(4.8, 3.8))
axis.plot([0, 1], [0, 1], ":", color="gray", label="perfect")
kinds = ((answer, "with the posterior", "o", "C0"), (plain(whole.mu), "cosines alone", "s", "C1"))
for each, name, mark, colour in kinds:
    confidence = torch.from_numpy(each.confidence)
    hit = torch.from_numpy(each.label == truth.numpy()).double()
    group = torch.bucketize(confidence, torch.linspace(0, 1, 11, dtype=torch.float64)[1:-1])
    inside = [group == i for i in range(10) if (group == i).sum() >= 10]
    x, y = ([float(values[rows].mean()) for rows in inside] for values in (confidence, hit))
    error = [float((hit[rows].mean() * (1 - hit[rows].mean()) / rows.sum()).sqrt()) for rows in inside]
    axis.errorbar(x, y, error, fmt=mark, capsize=3, markersize=5, label=name, color=colour)
    print(
        f"{name}: Brier score {(confidence - hit).square().mean():.4f}, "
        f"wrong decisions at 0.5: {((confidence > 0.5).double() != hit).double().mean():.2%}"
    )
axis.set(xlabel="confidence", ylabel="share of right answers", xlim=(0, 1.02), ylim=(0, 1.05))
axis.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# More: [may I act on this hit?](../decide.html), [the statistics](../statistics.html).


# %%
info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.processor())
print(f"All numbers of this page are computed in it, on: {cpu}, {torch.get_num_threads()} thread(s),")
print(f"torch {torch.__version__}, Python {platform.python_version()}")
