# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Curvature, for researchers
#
# What does the Hessian of a contrastive loss look like, what does each way of making it positive semidefinite do to it,
# and how far are Kronecker factors from the exact matrix? On a network that is small enough to write everything down,
# in float64, with autograd as the judge.

# %%
import os
import platform
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.utils import parameters_to_vector

import contrastive_curvature as cc

SMALL = "GALLERY_SMALL" in os.environ  # for the test of this page
torch.manual_seed(0)

pictures, digits = load_digits(return_X_y=True)
x, y = torch.as_tensor(pictures / 16), torch.as_tensor(digits)
points = 40 if SMALL else 150
network = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
loss = cc.ContrastiveLoss(margin=0.7, normalization="type")
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
for _step in range(20 if SMALL else 200):
    rows = torch.randperm(len(x) - points)[:200] + points
    optimizer.zero_grad()
    loss(network(x[rows]), y[rows]).backward()
    optimizer.step()
x, y = x[:points], y[:points]  # not trained on
weights = parameters_to_vector(network.parameters()).detach()
print(
    f"{points} points, {len(weights)} parameters, {points * (points - 1) // 2:,} pairs, loss {loss(network(x), y):.4f}"
)

# %% [markdown]
# ## In the outputs
#
# The loss is a function of N outputs of D numbers, so its Hessian is (N D, N D). `cc.output_hessian` gives it in closed
# form. `pd_fix="full"` is the exact one. Autograd agrees:

# %%
z = network(x).detach()
exact = hessian(lambda flat: loss(flat.view_as(z), y))(z.flatten())
ours = cc.output_hessian(z, y, loss=loss, pd_fix="full").dense()
print(f"relative Frobenius error against autograd: {(ours - exact).norm() / exact.norm():.1e}")

# %% [markdown]
# It is indefinite: moving along a negative eigenvector lowers the loss to second order. A Gaussian posterior needs a
# matrix without negative eigenvalues. Each `pd_fix` is a way to one: `positive` keeps positive pairs only, `fixed`
# drops the blocks between different points, `psd` projects each point's block as well. A softmax loss such as InfoNCE
# has second derivatives in the cosines, and with them two more: `ggn` keeps the terms with these alone, `psd_parts`
# adds the projected rest, point by point.

# %%
contrast, softmax = cc.ContrastiveLoss(0.7, normalization="type"), cc.InfoNCELoss(0.1)
cases = [(contrast, fix) for fix in ("full", "positive", "fixed", "psd")]
cases += [(softmax, fix) for fix in ("full", "ggn", "ggn_fixed", "psd_parts")]
meaning = {
    "full": "full: exact H",
    "positive": "positive: positive pairs only",
    "fixed": "fixed: no blocks between points",
    "psd": "psd: fixed, projected",
    "ggn": "ggn: second derivatives only",
    "ggn_fixed": "ggn_fixed: the same, no blocks between points",
    "psd_parts": "psd_parts: ggn_fixed + projected rest",
}
fig, axes = plt.subplots(1, 2, figsize=(8.4, 4.2))
for axis, function, title in (
    (axes[0], contrast, "contrastive loss, margin 0.7"),
    (axes[1], softmax, "InfoNCE, temperature 0.1"),
):
    largest = None
    for (_, fix), style in zip([case for case in cases if case[0] is function], ("-", "--", "-.", ":"), strict=True):
        values = torch.linalg.eigvalsh(cc.output_hessian(z, y, loss=function, pd_fix=fix).dense()).flip(0)
        largest = largest or float(values[0])
        axis.plot(np.linspace(0, 1, len(values)), values / largest, style, label=meaning[fix], linewidth=1.8)
        negative = int((values < -1e-10 * values.abs().max()).sum())
        print(
            f"{type(function).__name__:16} {fix:10} eigenvalues: {negative:3} of {len(values)} negative, "
            f"smallest {values[-1] / largest:+.4f} of the largest of full"
        )
    axis.axhline(0, color="gray", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=1e-3)
    axis.set(title=title, xlabel="rank of the eigenvalue / N D", ylabel="eigenvalue / largest of full")
    axis.legend(frameon=False, fontsize=7.5, loc="lower left")
    axis.set_ylim(bottom=-30)
plt.show()

# %% [markdown]
# ## In the parameters
#
# The library computes the generalised Gauss-Newton matrix `J^T H J`, with the Jacobian `J` of the outputs. The Hessian
# of the loss in the parameters has one more term, the gradient of the loss in the outputs times the second derivatives
# of the network. The chain rule says that the two differ by this term alone, and that it vanishes for the last layer,
# in which the outputs are linear.

# %%
names = [name for name, _ in network.named_parameters()]
shapes = [parameter.shape for parameter in network.parameters()]


def loss_of(flat):
    parts = flat.split([shape.numel() for shape in shapes])
    given = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    return loss(functional_call(network, given, (x,)), y)


of_weights = hessian(loss_of)(weights)
ggn = {
    fix: cc.ggn(network, x, y, loss=loss, pd_fix=fix, structure="full", clamp=False)
    for fix in ("full", "positive", "fixed", "psd")
}
last = slice(len(weights) - shapes[-2].numel() - shapes[-1].numel(), None)
print(f"all parameters: |J^T H J - Hessian| / |Hessian| = {(ggn['full'] - of_weights).norm() / of_weights.norm():.3f}")
print(
    "last layer:     |J^T H J - Hessian| / |Hessian| = "
    f"{(ggn['full'] - of_weights)[last, last].norm() / of_weights[last, last].norm():.1e}"
)

fig, axis = plt.subplots(figsize=(6.6, 4))
curves = {
    "Hessian of the loss (autograd)": of_weights,
    **{f"J^T H J, {meaning[fix]}": matrix for fix, matrix in ggn.items()},
}
top = float(torch.linalg.eigvalsh(of_weights)[-1])
for (name, matrix), style in zip(curves.items(), ("-", "-", "--", "-.", ":"), strict=True):
    values = torch.linalg.eigvalsh(matrix).flip(0) / top
    axis.plot(range(1, len(values) + 1), values, style, label=name, color="black" if "autograd" in name else None)
axis.axhline(0, color="gray", linewidth=0.8)
axis.set_yscale("symlog", linthresh=1e-6)
axis.set(xlabel="eigenvalue, from the largest to the smallest", ylabel="eigenvalue / largest of the Hessian")
axis.legend(frameon=False, fontsize=7.5, loc="upper right")
plt.show()
for fix, matrix in ggn.items():
    values = torch.linalg.eigvalsh(matrix)
    print(
        f"{fix:9} trace / that of the Hessian: {matrix.trace() / of_weights.trace():.2f}, "
        f"negative part of the trace: {-values.clamp_max(0).sum() / values.clamp_min(0).sum():.2f} of the positive"
    )

# %% [markdown]
# Without the blocks between points (`fixed`, `psd`) the eigenvalues fall alike, but the trace is far larger: when one
# point of a pair moves, the other one often moves along, and these blocks are what knows it.
#
# ## Kronecker factors
#
# K-FAC writes the block of each weight matrix as a Kronecker product of a matrix of the outputs and one of the inputs
# of the layer. The error is measured against the exact block, in the Frobenius norm; keeping nothing at all has the
# error 1. Blocks between points are left out.

# %%
kron_fixes = ["fixed", "psd", "positive", "full"]
layers = [(number, name) for number, name in enumerate(names) if name.endswith("weight")]
starts = np.cumsum([0, *(shape.numel() for shape in shapes)])
errors, pairs_of_blocks = {}, {}
for fix in kron_fixes:
    factors = cc.ggn(network, x, y, loss=loss, pd_fix=fix, structure="kron", clamp=False)
    for number, _ in layers:
        block = ggn[fix][starts[number] : starts[number + 1], starts[number] : starts[number + 1]]
        found = torch.kron(*factors[number])
        errors[fix, number] = float((found - block).norm() / block.norm())
        pairs_of_blocks[fix, number] = block, found
fig, axis = plt.subplots(figsize=(7.6, 3.2))
for place, (number, _) in enumerate(layers):
    bars = axis.bar(
        np.arange(len(kron_fixes)) + 0.27 * (place - 1),
        [errors[fix, number] for fix in kron_fixes],
        0.25,
        label=f"layer {place + 1}",
        hatch=("", "//", "..")[place],
        edgecolor="white",
    )
    axis.bar_label(bars, fmt="%.2f", fontsize=7)
axis.axhline(1, color="gray", linestyle=":")
axis.annotate("as wrong as keeping nothing", (-0.4, 1.05), va="bottom", fontsize=8, color="gray")
axis.set_xticks(range(len(kron_fixes)), kron_fixes)
axis.set(xlabel="pd_fix", ylabel="relative error of the block")
axis.legend(frameon=False, ncols=3, loc="upper left")
axis.set_yscale("log")
axis.set_ylim(0.1, 3 * max(1.0, *errors.values()))
plt.show()

# %% [markdown]
# The factors are worse than nothing where the fix has blocks between points: these cancel most of the rest, and K-FAC
# drops them. For fixes without such blocks, which are the ones that posteriors use, it is a fair approximation. In
# the last layer, with `psd`, the error looks as follows: rows and columns are the weights, those of one output after
# those of another. A Kronecker product has the same pattern of inputs for any two outputs, so it keeps the blocks on
# the diagonal and loses much of what is between different outputs.

# %%
number = layers[-1][0]
block, found = pairs_of_blocks["psd", number]
size = float(block.abs().max())
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.9))
for axis, matrix, title in zip(
    axes, (block, found, found - block), ("exact", "Kronecker product", "difference"), strict=True
):
    shown = axis.imshow(matrix / size, cmap="PuOr", vmin=-1, vmax=1)
    axis.set(title=title, xticks=[], yticks=[], xlabel="weights of layer 3")
fig.colorbar(shown, ax=axes, label="entry / largest exact one", shrink=0.9)
plt.show()

# %% [markdown]
# ## Without writing it down
#
# For networks whose matrix does not fit anywhere, the same curvature is a linear operator of curvlinops, over all pairs
# of a data set. Its largest eigenvalues come from products with vectors alone:

# %%
fixed = cc.ContrastiveLoss(0.7, normalization="type", pd_fix="psd")
operator = cc.ContrastiveGGNLinearOperator(network, fixed, None, [(x, y)])
lanczos = eigsh(operator.to_scipy(), k=5, which="LA", return_eigenvectors=False, v0=np.ones(len(weights)))[::-1]
dense = torch.linalg.eigvalsh(cc.ggn(network, x, y, loss=fixed, structure="full")).flip(0)[:5].numpy()
print("operator, Lanczos:", np.array2string(lanczos, precision=6))
print("dense:            ", np.array2string(dense, precision=6))

# %% [markdown]
# More: [what is computed](../theory.html), [losses](../losses.html), [backends](../backends.html).


# %%
info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.processor())
print(f"All numbers of this page are computed in it, on: {cpu}, {torch.get_num_threads()} thread(s),")
print(f"torch {torch.__version__}, Python {platform.python_version()}")
