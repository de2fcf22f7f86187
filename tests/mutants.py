"""Mutants of the core: one wrong sign, factor, index or term each, and the tests that have to notice.

``python tests/mutants.py [--only SUBSTRING] [--list] [--jobs N]`` tries each mutant in a temporary copy of the working
tree. A row says what is wrong then, the formula that it breaks, where, and the narrowest tests. Whoever moves or
rewrites the code carries the row over: the formula stays, the file and the text change.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import checkout

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "contrastive_curvature"
PROFILE = """
from hypothesis import Phase, settings
settings.register_profile("mutants", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
"""
"""The examples of `make test`, of which no smaller ones are looked for: one that fails is enough."""
LIMIT = 900
"""Seconds after which a mutant counts as killed: it made the tests endless."""


class Mutant(NamedTuple):
    name: str
    formula: str
    file: str  # in the package
    old: str  # once in the file
    new: str
    targets: str  # files or node ids in tests/, separated by blanks
    survives: str = ""  # why no test can or does notice


M = Mutant
# fmt: off
MUTANTS = [
    # pairs
    M("a class counts the point itself as a positive", "|P(i)| = size of the class - 1", "pairs/relation.py",
      "return own - 1, self.n - own", "return own, self.n - own", "losses/test_derivatives.py"),
    M("a point is its own positive in a block of rows", "no pair {i, i}", "pairs/relation.py",
      "positive[itself - start, itself - first] = False", "positive[itself - start, itself - first] |= False",
      "losses/test_anchor_losses.py losses/test_derivatives.py"),
    M("a pair that is listed twice counts once", "multiplicity of a listed pair", "pairs/edges.py",
      "minlength=n * n).view(n, n)", "minlength=n * n).clamp(max=1).view(n, n)",
      "losses/test_pair_losses.py losses/test_derivatives.py"),
    M("listed pairs are seen from their first point only", "{i, j} = {j, i}", "pairs/edges.py",
      "return listed + listed.T", "return listed",
      "losses/test_derivatives.py losses/test_anchor_losses.py"),

    # losses: their two rules
    M("margin on the wrong scale", "a negative counts where u_i . u_j > 1 - m^2 / 2", "losses/contrastive.py",
      "return 1 - margin**2 / 2 if", "return 1 - margin**2 if", "losses/test_derivatives.py"),
    M("positive fix of a curved loss keeps the negatives", "first derivatives of the positives alone (Eq. 109)",
      "losses/pair_derivatives.py", "_checked_terms(cosine, attract, nothing).first",
      "_checked_terms(cosine, attract, repel).first", "losses/test_pair_losses.py"),
    M("second derivative of the logistic loss takes negatives off", "c = a^2 (w+ + w-) sigma (1 - sigma)",
      "losses/logistic.py", "(positive + negative) * same * other", "(positive - negative) * same * other",
      "losses/test_pair_losses.py"),
    M("second root of InfoNCE has the wrong sign", "q2 = w / sqrt(G) - V / (2 sqrt(G)) nu", "losses/infonce.py",
      "root - half * share)", "root + half * share)",
      "losses/test_anchor_losses.py::test_output_hessian_equals_autograd"),
    M("a negative counts in full however often it is listed", "log Z = log sum m_n exp(s / tau)", "losses/row_loss.py",
      "logits + times.log()", "logits",
      "losses/test_anchor_losses.py::test_value_is_that_of_a_loop_over_anchors"),
    M("SupCon's first derivative of a leading positive", "p - t = (1 - t) - sum of the other p", "losses/supcon.py",
      "(1 - target) - rest", "(1 - target) + rest",
      "losses/test_anchor_losses.py::test_output_hessian_equals_autograd"),
    M("negatives curve the multi-similarity loss downwards", "c = alpha p + beta q", "losses/multisimilarity.py",
      "self.alpha * p + self.beta * q", "self.alpha * p - self.beta * q",
      "losses/test_anchor_losses.py::test_output_hessian_equals_autograd"),
    M("triplet margin is halved once too little", "active: s_n > s_p - m / 2", "losses/triplet_hinge.py",
      "_sorted(cosine - self.margin / 2, positive)", "_sorted(cosine - self.margin, positive)",
      "losses/test_anchor_losses.py::test_value_is_that_of_a_loop_over_anchors"),
    M("soft contrastive loss bends too little", "d2(distance)/ds2 = slope / distance^2", "losses/soft_contrastive.py",
      "bend = slope / length.square()", "bend = slope / length", "losses/test_soft_contrastive.py"),
    M("ArcFace's slope has the wrong sign", "phi'(s) = cos m + sin m s / sqrt(1 - s^2)", "losses/proxy.py",
      "first = math.cos(self.margin) + math", "first = math.cos(self.margin) - math", "losses/test_proxy.py"),
    M("a mean over both directions counts twice in a fit", "scale = anchors / directions / terms", "losses/row_loss.py",
      "else anchors.double() / len(sides)", "else anchors.double()", "towers/test_towers_exact.py"),
    M("candidates of anchors lack what the roots take off", "c_j = diag - sum sign q_j^2", "losses/row_loss.py",
      "addcmul(out, root, root, value=float(sign))", "addcmul(out, root, root, value=-float(sign))",
      "losses/test_anchor_losses.py::test_output_hessian_equals_autograd"),
    M("mining takes the margin for a squared distance", "|u_a - u_n|^2 < m^2", "losses/contrastive.py",
      ".sum(1) < self.margin**2", ".sum(1) < self.margin", "losses/test_mining.py"),

    # losses: weighting, sums over classes, sampled negatives
    M("a pair has the share of its first point", "(r_i + r_j) / 2", "losses/weighting.py",
      "half * a.unsqueeze(1) + half * b if", "factor * a.unsqueeze(1) + 0 * b if", "losses/test_derivatives.py"),
    M("pairs of a data set from one point too many", "N (N - 1) / 2 pairs", "losses/weighting.py",
      "(n * (n - 1) - same) / 2", "(n * n - same) / 2", "fit/test_dataset.py"),
    M("without a margin, a class repels itself", "sum over all classes minus the own one",
      "losses/contrastive.py", "+ self._weighted - share * own)", "+ self._weighted)",
      "losses/test_derivatives.py losses/test_pair_losses.py"),
    M("a sampled negative stands for the wrong number", "n / m points of other classes",
      "losses/over_dataset.py", "there.double() / drawn.clamp(min=1)", "drawn.double() / there.clamp(min=1)",
      "fit/test_negative_samples.py::test_the_mean_over_all_samples_is_the_exact_curvature"),
    M("a banked negative stands for itself alone", "n / m points of other classes",
      "losses/over_dataset.py", "columns.weight.to(x.dtype)[index].unsqueeze(1) * repels", "1.0 * repels",
      "fit/test_negative_samples.py::test_the_mean_over_all_samples_is_the_exact_curvature"),

    # hessian
    M("Euclidean blocks go with 1 / n", "d P / n^2", "hessian/node_blocks.py",
      "d.to(n.dtype) / n / n", "d.to(n.dtype) / n", "losses/test_pair_losses.py"),
    M("psd leaves the repelling directions negative", "c = max(0, c)", "hessian/node_blocks.py",
      "c = self.c.clamp(min=0)\n", "c = self.c\n", "losses/test_pair_losses.py"),
    M("psd counts the tangent twice", "p = lambda a_t^2 - c", "hessian/node_blocks.py",
      "value * along_t**2 - c, 0.0)", "value * along_t**2, 0.0)",
      "losses/test_pair_losses.py losses/test_anchor_losses.py"),
    M("cross blocks have the second derivative's sign wrong", "+ c_ij (P_i u_j) (P_j u_i)^T", "hessian/cross.py",
      "out += self.c * (a @", "out -= self.c * (a @", "losses/test_pair_losses.py"),
    M("axis of a cross block takes one end twice", "(u_j - s u_i)_k (u_i - s u_j)_k", "hessian/cross.py",
      "second * (y - cosine * x) * (x - cosine * y)", "second * (y - cosine * x) * (y - cosine * x)",
      "losses/test_pair_losses.py losses/test_anchor_losses.py"),
    M("diagonal of a cross block drops a square", "s u_k v_k + 1 - u_k^2 - v_k^2", "hessian/cross.py",
      ".sub_(u.square_()).sub_(v.square_())", ".sub_(u.square_())", "fit/test_ggn.py losses/test_pair_losses.py"),
    M("squares couple a point with itself", "the block of a point with itself is not a cross block",
      "hessian/cross.py", "out[:, self.same_rows, self.same_columns] = 0", "pass",
      "losses/test_anchor_losses.py::test_products_and_cross_blocks_agree_with_dense"),
    M("psd_parts leaves the first-order part as it is", "project F, keep K", "hessian/output.py",
      "        blocks = blocks.project_psd()\n", "        pass\n", "losses/test_pair_losses.py"),
    M("moments are projected on one side", "diag(P M P) = M_kk - 2 u_k (M u)_k + u_k^2 u.Mu", "hessian/moments.py",
      "mixed = 2 * (along @ others)", "mixed = (along @ others)", "losses/test_pair_losses.py"),
    M("a part of the points has the rows of the first ones", "rows i of the part = rows i + start of all",
      "hessian/derivatives.py", "self.whole.rows(start + self._start, stop + self._start",
      "self.whole.rows(start, stop", "towers/test_towers_exact.py hessian/test_output_hessian.py"),

    # fit
    M("cross sums count a point with itself", "sum over i != j: add y_cc P / n^2 to the block", "fit/cross_terms.py",
      "part.blocks.add_projector(y[index]", "part.blocks.add_projector(0 * y[index]", "fit/test_dataset.py"),
    M("a point is told apart by its place in the batch", "no pair of a point with itself", "losses/over_dataset.py",
      "itself = numbers.unsqueeze(1)", "itself = torch.arange(len(x), device=x.device).unsqueeze(1)",
      "fit/test_dataset.py losses/test_soft_contrastive.py"),
    M("sampled negatives outside the margin repel", "y = 0 where u_i . u_j <= 1 - m^2 / 2",
      "losses/contrastive.py", "inside.gt_(self.cosine)", "inside.fill_(1)",
      "fit/test_negative_samples.py"),
    M("pairs inside batches count for themselves alone", "all pairs / pairs inside batches (Prop. B.1)",
      "fit/batches.py", "every.shares[every.index(targets)].standing_for(every.totals, inside)",
      "every.shares[every.index(targets)]",
      "laplace/test_laplace.py::test_pairs_inside_batches_stand_for_all_pairs_of_their_type"),
    M("a batch stands for one point too many", "N (N - 1) / (B (B - 1)) pairs", "losses/weighting.py",
      "[n_data - 1] * 2", "[n_data] * 2", "online/test_online_step.py"),
    M("input factors are not divided by the points", "A = sum a a^T / N", "structures/kron.py",
      "part / self.points.to(part)", "part / 1", "towers/test_towers_exact.py"),
    M("the second tower has the blocks of the first", "rows first.. of the Hessian", "fit/tower_batches.py",
      "[slice(0, first), slice(first, len(z))]", "[slice(0, first), slice(0, len(z) - first)]",
      "towers/test_towers_exact.py"),
    M("the longest output is taken for the shortest", "the smaller of two norms", "fit/total.py",
      "one[0] <= other[0]", "one[0] >= other[0]", "fit/test_short_outputs.py"),
    M("a short output is compared by its norm, not its square", "weight 1 / norm^2", "fit/loop.py",
      "* total.n) ** 0.5 <", "* total.n) <", "fit/test_short_outputs.py"),
    M("a condition on a GPU is never looked at again", "each condition is looked at", "waiting.py",
      "        raise\n    _look(pending)", "        raise", "fit/test_waits.py"),
    M("a batch waits for its labels", "classes are counted on the CPU", "losses/weighting.py",
      "known = self._labels_on_cpu", "known = self._labels_on_cpu.to(known.device)", "fit/test_waits.py"),
    M("a batch waits for its inputs", "copies to a GPU are not waited for", "waiting.py",
      "non_blocking=device.type not in _WITHOUT_WAITING", "non_blocking=False", "fit/test_waits.py"),
    M("sampled columns are too short", "V e / sqrt(K)", "hessian/blocks.py",
      "/ self.mc_samples**0.5", "/ self.mc_samples", "fit/test_sampling.py"),
    M("clamping folds negative eigenvalues up", "max(0, lambda)", "structures/finite.py",
      "(vectors * values.clamp(min=0)) @", "(vectors * values.abs()) @", "fit/test_ggn.py"),

    # network
    M("positions of an entry are averaged", "bias: sum over the positions", "network/layer_parts.py",
      "else terms).sum(2)", "else terms).mean(2)", "network/test_layerwise.py"),
    M("forms count each pair once", "sum over (i, j) and (j, i)", "network/layer_parts.py",
      "alpha=2 if same else 1", "alpha=1", "network/test_layerwise.py"),
    M("tangent axes lose a norm", "w_ii = c n^2 on axes P e / n", "network/layerwise.py",
      "blocks.c * hessian.n.square()", "blocks.c * hessian.n", "network/test_layerwise.py fit/test_ggn.py"),
    M("a function that nobody knows keeps the points", "one of another axis may move them", "network/recorder.py",
      "if func not in _ENTRY_BY_ENTRY:\n        return False", "if func not in _ENTRY_BY_ENTRY:\n        return True",
      "network/test_layerwise_proof.py"),
    M("a use that no mode sees is trusted", "uses in autograd's graph <= uses recorded", "network/recorder.py",
      "return min(uses.values(), default=0) >= 0", "return True", "network/test_layerwise_proof.py"),
    M("input factors sum over positions", "A = mean over points and positions", "network/layerwise.py",
      "alpha=1 / inputs.shape[1]", "alpha=1",
      "fit/test_ggn.py::test_input_factors_are_means_over_points_and_positions"),
    M("unit inputs of a table are not averaged", "A = I / number of positions", "network/layerwise.py",
      "* (share / others)", "* share",
      "fit/test_ggn.py::test_input_factors_are_means_over_points_and_positions"),
    M("last layer counts each pair once", "sum over (i, j) and (j, i)", "network/last_layer.py",
      "return out.mul_(2), total.mul_(2)\n", "return out, total\n", "fit/test_ggn.py fit/test_dataset.py"),
    M("bias of the last layer is left out of the variance", "sum var(W) phi^2 + var(b)", "network/last_layer.py",
      "return out + variance[weights:] if", "return out + 0 * variance[weights:] if",
      "laplace/test_laplace_predict.py::test_predictions_have_the_linearised_covariance"),

    # laplace
    M("temperature takes the effective parameters off", "T = 2 L / (N + gamma)", "posterior/prior.py",
      "(fitted.n + gamma)", "(fitted.n - gamma)", "laplace/test_laplace_predict.py"),
    M("effective parameters without the prior", "sum h / (h + d)", "structures/structure.py",
      "total = basis.values.double() + d", "total = basis.values.double() + 1",
      "structures/test_structures.py"),
    M("influence of an item's own gradient alone", "g_k = grad (L - L_without_k)", "laplace/influence.py",
      "lost[keep] -= _slope(loss, z[keep], labels[keep])", "lost[keep] = 0", "laplace/test_influence.py"),
    M("influence without the temperature", "(H / T + prior)^-1 g / T", "laplace/influence.py",
      "precision, factor) * factor", "precision, factor)", "laplace/test_influence.py"),
    M("a Newton step with the wrong sign", "theta + (H + prior)^-1 g", "laplace/influence.py",
      "vector_to_parameters(rest.mean + move", "vector_to_parameters(rest.mean - move", "laplace/test_influence.py"),
    M("pairs of others weigh the same without an item", "shares change with the classes", "laplace/influence.py",
      "return (own + torch.stack", "return (own + 0 * torch.stack", "laplace/test_influence.py"),
    M("a Newton step that removes nothing", "g = grad (L - L_of_the_rest)", "laplace/influence.py",
      "points.kept(batch.numbers // views)", "points.kept(batch.numbers - batch.numbers - 1)",
      "laplace/test_influence.py"),
    M("a Newton step takes the second view for another input", "view = number % views, input = number // views",
      "laplace/influence.py", "points.kept(batch.numbers // views)", "points.kept(batch.numbers)",
      "laplace/test_influence.py"),
    M("influence in the order of reading", "column k is the k-th point of the data set", "laplace/influence.py",
      "return found[:, torch.cat(numbers).argsort()]", "return found", "laplace/test_influence.py"),
    M("the match does not move with the weights", "J_match^T dm/dz_match", "laplace/influence.py",
      "cotangents[index[row] - start] += slope[row]", "cotangents[index[row] - start] += 0",
      "laplace/test_influence.py"),
    M("a matrix is turned against the prior on one side", "D^-1/2 H D^-1/2", "structures/dense.py",
      "scale.unsqueeze(1) * self._matrix() * scale", "self._matrix() * scale * scale",
      "structures/test_structures.py"),
    M("complement of the low-rank input factor is too large", "F - R directions with g rho + prior",
      "structures/kron_lowrank.py", "across * (1 - self.rank / self._width)", "across",
      "laplace/test_kron_lowrank.py"),
    M("low-rank diagonal counts the rest twice", "rho + q^2 (l - rho)", "structures/kron_lowrank.py",
      "across * (1 - squares.sum(1))", "across", "laplace/test_kron_lowrank.py"),
    M("bias is predicted with the weight's prior", "G_b + delta_b", "structures/kron_lowrank.py",
      "weight, bias = prior.reshape(-1)[0], prior.reshape(-1)[-1]", "weight = bias = prior.reshape(-1)[0]",
      "laplace/test_kron_lowrank.py"),
    M("merged input factors are those of the first data set", "A = (N1 A1 + N2 A2) / (N1 + N2)", "structures/kron.py",
      "blocks.u.new_full((), len(blocks), dtype=torch.float64)", "blocks.u.new_full((), 1, dtype=torch.float64)",
      "laplace/test_laplace.py::test_a_continued_fit_adds_a_further_data_set"),
    M("calibration compares with what it standardises with", "split: scale from one part, ranks from the other",
      "posterior/p_values.py", "known, measured = split(measured)", "known, _ = split(measured)",
      "laplace/test_calibrate.py"),
    M("the typical norm of merged fits is that of two fits", "t = (N1 t1 + N2 t2) / (N1 + N2)", "posterior/value.py",
      "(self.n * self.typical_norm + later.n * later.typical_norm) / (self.n + later.n)",
      "(self.typical_norm + later.typical_norm) / 2", "laplace/test_calibrate.py"),
    M("the cost of an earlier fit is lost", "L = L1 + L2", "posterior/value.py",
      "cost=self.cost + later.cost,", "cost=later.cost,", "laplace/test_laplace.py"),
    M("a prior is the caller's tensor", "what is handed in or out changes no posterior", "laplace/posterior.py",
      ".reshape(-1).clone()", ".reshape(-1)", "laplace/test_value.py"),
    M("a calibration survives another prior", "p-values belong to one prior and temperature", "posterior/value.py",
      "else _OUTDATED", "else None", "laplace/test_value.py"),
    M("a fit is assigned before its labels are seen", "the last line of a change assigns it", "laplace/posterior.py",
      "posterior = self.after(result,", "posterior = self._value = self.after(result,", "laplace/test_value.py"),
    M("an input that repeats fills a sample", "of one content, one in twenty rows a turn", "pairs/rows.py",
      "order[_turns(keys, self.size).argsort(stable=True)[: self.size]]", "order[: self.size]", "parts/test_rows.py"),
    M("the place of a point decides what a posterior keeps", "points are numbered by their outputs", "fit/observers.py",
      "self._rows.add(content_numbers(part.z),", "self._rows.add(torch.arange(len(part.z)),",
      "laplace/test_calibrate.py"),
    M("a training input is left in its own centre", "centre without the input", "fit/class_centres.py",
      "self.sums[own] - units.double()", "self.sums[own]", "embedding/test_class_centres.py"),

    # embedding
    M("uncertainty goes with 1 / n instead of its root", "sqrt(V) / n sqrt(t / n)", "embedding/distribution.py",
      "tangential * (typical_norm / norm)", "tangential * (typical_norm / norm) ** 2",
      "embedding/test_class_centres.py"),
    M("variance along the mean counts for a posterior", "V = tr Cov - u.Cov u", "embedding/distribution.py",
      "((total - radial) / norm / norm)", "(total / norm / norm)", "embedding/test_embedding_rows.py"),
    M("variance along the mean counts", "(tr V - u.V u) / n^2", "vmf/estimation.py",
      "across = total - radial", "across = total + 0 * radial", "vmf/test_vmf_estimation.py"),
    M("two spreads do not meet", "tr(C_a C_b)", "embedding/similarity.py",
      "(spread_b + outer_b)", "outer_b", "embedding/test_similarity.py"),
    M("what a mean lacks of norm one forgets the bend", "1 - |E x|^2 = tau by_tau - |c|^2 (1 + tau + rho)^-3",
      "embedding/similarity.py", "- bend * (whole + rho) ** -3", "- bend * (whole + rho) ** -1.5",
      "embedding/test_similarity.py"),
    M("p-value of zero", "(1 + #{known >= s}) / (n + 1)", "embedding/known.py",
      "(n + 1 - below)", "(n - below)", "embedding/test_known.py"),
    M("held-out distances know their own inputs", "a fifth under the Gaussians of the others", "embedding/known.py",
      "rest = torch.cat([*folds[:number], *folds[number + 1 :]])", "rest = order", "embedding/test_known.py"),
    M("the other tail of novelty", "-log(1 - Phi(z))", "embedding/known.py",
      "log_ndtr(below)", "log_ndtr(-below)", "embedding/test_known.py"),
    M("the other tail of an exported novelty", "-log(1 - Phi(z))", "io/serving/served_encoder.py",
      "tails > 0, -log_p", "tails < 0, -log_p", "embedding/test_known.py"),
    M("class means of the sample shrink the covariance", "rows within a class times sqrt(n / (n - 1))",
      "embedding/known.py", "counts / (counts - 1)", "counts / counts", "embedding/test_known.py"),

    # files
    M("a new file is not locked", "removed: what no writer locks", "artifact.py",
      "        _lock(file, wait=True)\n", "", "test_artifact.py::test_writers_of_one_file_at_the_same_time"),
    M("a file is unlocked before it has its name", "a complete file is locked until it has its name", "artifact.py",
      "            os.replace(file.name, target)", "        os.replace(file.name, target)",
      "test_artifact.py::test_writers_of_one_file_at_the_same_time"),
    M("a file is written under its name", "old or new, whole, after a kill at any line", "artifact.py",
      "    file = _unfinished(target)\n", '    file = target.open("wb")\n',
      "test_writes.py::test_a_kill_at_every_line"),
    M("what a killed writer leaves stays", "the next save removes it", "artifact.py",
      "    _remove_abandoned(target)\n    file", "    file", "test_writes.py::test_a_kill_at_every_line"),
    M("a graph keeps the lines of the encoder", "no code in a file", "io/serving/export.py",
      'node.meta.pop("stack_trace", None)', "pass", "test_no_data_in_files.py"),

    # hosts
    M("BackPACK's second derivative of the normalisation has the wrong sign", "d2(z / |z|) g",
      "hosts/backpack/module_derivatives.py", "return -moved / n / n", "return moved / n / n",
      "hosts/test_backpack_extensions.py"),
    M("BackPACK's HMP leaves a factor of the loss out", "Hessian of a loss = a Hessian of the loss",
      "hosts/backpack/extension_registry.py", "factor * products(hessian, mat)", "products(hessian, mat)",
      "hosts/test_backpack_extensions.py::test_hmp_is_the_hessian_of_the_loss"),
    M("BackPACK's HMP takes every fix", "Hessian = J^T H J + sum_k g_k z_k'', H of the loss itself",
      "hosts/backpack/module_derivatives.py", "hessian.pd_fix not in whole:", "False:",
      "hosts/test_backpack_extensions.py::test_options_that_change_the_hessian_are_refused_where_it_is_wanted"),
    M("BackPACK's diagonal forgets the signs", "sum sign (B^T v)^2", "hosts/backpack/extensions.py",
      "torch.tensordot(signs[part], moved", "torch.tensordot(signs[part].abs(), moved",
      "hosts/test_backpack_extensions.py"),
    M("StochMan's calculators have half of the curvature", "w_n = 1/2 halves both kinds: times 2",
      "hosts/stochman/calculators.py", "else 2 * curvature", "else curvature", "hosts/test_stochman_calculators.py"),

    # the retriever: its evidence and its limits
    M("a query without its class keeps it", "cosines of the own class count nothing", "retriever/evidence.py",
      "cosine.masked_fill_(of == without[rows, None].to(classes), -torch.inf)", "pass",
      "retriever/test_promises.py::test_evidence_against_a_search_by_hand"),
    M("the gap is to the nearest of any class", "nearest of another class than the match", "retriever/evidence.py",
      "other, far = cosine.masked_fill_(of == voters[:, :1], -torch.inf).max(1)", "other, far = cosine.max(1)",
      "retriever/test_promises.py::test_evidence_against_a_search_by_hand"),
    M("an index is not asked for more", "ten others, of two classes", "retriever/evidence.py",
      "k = min(2 * k, m)", "break",
      "retriever/test_retriever.py::test_an_exact_index_gives_the_answers_of_the_search_of_all"),
    M("an unknown query counts among false matches", "unknown queries are not answered anyway", "retriever/rule.py",
      "_largest(usual, np.where(known, lacking, np.inf), held.classes)", "_largest(usual, lacking, held.classes)",
      "retriever/test_promises.py"),
    M("an index is believed", "|d - (1 - cosine to the stored point)| <= 0.003 + 0.1 d", "retriever/index.py",
      "<= _NEAR + _SHARE * np.abs(true)", "<= np.inf", "retriever/test_index.py"),
    M("a repeated query counts each time", "the binomial test counts distinct queries", "retriever/evidence.py",
      "return np.sort(np.minimum.reduceat(order, np.flatnonzero(np.append(True, apart.numpy()))))",
      "return np.arange(len(self))", "retriever/test_retriever.py::test_repeated_held_out_queries_count_once"),
    M("an identifier is given twice", "the counter only grows", "retriever/state.py",
      "following,\n            joined(", "int(now.identifiers[-1]),\n            joined(",
      "retriever/test_retriever.py::test_a_gallery_that_grew_is_as_one_that_was_given_and_one_that_shrank_as_before"),
    M("a retriever changes before it warns", "a warning that is an error changes nothing", "retriever/retriever.py",
      "        for message in (*more,", "        self._state = new\n        for message in (*more,",
      "retriever/test_state.py::test_a_warning_that_is_an_error_changes_nothing"),
    M("a query reads the state twice", "one gallery, its labels, its limits", "retriever/retriever.py",
      "return state.answers(", "return self._now.answers(",
      "retriever/test_state.py::test_a_change_at_any_line_of_a_query_gives_the_old_answers_or_the_new_ones"),
    M("two changes at once", "read, compute, assign: one after the other", "retriever/retriever.py",
      "_writing=Lock())", "_writing=__import__('contextlib').nullcontext())",
      "retriever/test_state.py::test_a_change_waits_for_another_one_so_that_none_is_lost"),
    M("a fit calibrates the user's posterior", "the argument stays as it is", "retriever/encoding.py",
      "new = copy.copy(posterior)", "new = posterior",
      "retriever/test_state.py::test_the_posterior_of_the_user_and_that_of_the_retriever_are_two"),
    M("a weight may have any sign", "a larger distance never raises P(right)", "retriever/rule.py",
      "bounds = [(0, None) if sign > 0 else (None, 0) for sign in COLUMNS.values()]",
      "bounds = [(None, None) for sign in COLUMNS.values()]",
      "retriever/test_promises.py::test_weights_are_those_of_scikit_learn_where_no_sign_binds"),
    M("one score decides", "answered: both scores within their limits", "retriever/rule.py",
      "(self.right(found.evidence) <= self.limit) & has_class", "self.right(found.evidence) <= self.limit",
      "retriever/test_retriever.py::test_answers_say_what_the_search_says"),
    M("scores of the queries that fitted them", "a fold is scored by the others", "retriever/rule.py",
      "inside, others = fold == k, fold != k", "inside, others = fold == k, fold >= 0",
      "retriever/test_promises.py::test_limits_are_those_of_scores_from_other_folds"),
    M("any match below a head will do", "the classes of both matches are one", "retriever/rule.py",
      "return near if found.same is None else near & found.same", "return near",
      "retriever/test_new_classes.py::test_a_head_is_answered_for_what_the_frozen_encoder_says"),
    M("a limit over classes without the + 1", "(sum of shares + 1) / (C + 1) <= rate", "retriever/rule.py",
      "(np.append(0, sums) + 1) / (len(each) + 1)", "np.append(0, sums) / len(each)",
      "retriever/test_new_classes.py::test_risk_control_over_classes_is_the_largest_limit_that_keeps_the_mean_over_classes"),
    M("answers that were fed back raise a limit", "limit <= that under which they were answered", "retriever/rule.py",
      "limit = min(limit, ceiling)", "limit = math.inf",
      "retriever/test_promises.py::test_feedback_on_answered_queries_only_lowers_a_limit"),
    M("a query is not counted in its p-value", "(1 + #{held out >= s}) / (n + 1)", "retriever/rule.py",
      "return (1 + n - np.searchsorted", "return (n - np.searchsorted",
      "retriever/test_retriever.py::test_answers_say_what_the_search_says"),
]
# fmt: on


def copied(into: Path) -> Path:
    """Copy the working tree, without what git ignores, and make sure that its package is the one imported."""
    for path in checkout.files():
        copy = into / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    with (into / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
        conftest.write(PROFILE)
    code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=into, env=_env(into), capture_output=True, text=True)
    if not found.stdout.strip().startswith(str(into)):
        sys.exit(f"{PACKAGE} is imported from {found.stdout.strip() or found.stderr}, not from the copy {into}")
    return into


def run_tests(copy: Path, targets: list[str]) -> tuple[int, str]:
    """Run pytest in the copy; its exit status, 1 where it does not end, and the end of what it printed."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--hypothesis-profile=mutants"]
    env = _env(copy) | ({"PRETEND_DEVICE": "1"} if "fit/test_waits.py" in targets else {})
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{target}" for target in targets)]
    limit = LIMIT if len(targets) < 4 else None  # all targets together take longer
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return 1, f"no end after {LIMIT} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-5:])


def verdict(mutant: Mutant, copy: Path) -> str:
    """Try one mutant, and leave the copy as it was."""
    path, original = copy / PACKAGE / mutant.file, ROOT / PACKAGE / mutant.file
    count = path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else 0
    if count != 1:
        return f"does not apply: {count} places in {mutant.file}"
    code = path.read_text(encoding="utf-8").replace(mutant.old, mutant.new)
    compile(code, str(path), "exec")  # a mutant that is no Python would be killed by every test
    path.write_text(code, encoding="utf-8")
    try:
        status, output = run_tests(copy, mutant.targets.split())
    finally:
        shutil.copy2(original, path)  # with its old time, so that the mutant's bytecode is stale
    if status == 1:
        return "killed"
    if status:
        return f"does not apply: pytest ended with {status}: {output}"
    return "survives, as marked" if mutant.survives else "survived"


def _env(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name, formula or file contains this")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if any(given.only in text for text in (m.name, m.formula, m.file))]
    if given.list or not chosen:
        print(*(f"{m.file}: {m.name} [{m.formula}] {m.targets}" for m in chosen), f"{len(chosen)} mutants", sep="\n")
        return 0 if chosen else 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(given.jobs):
            copies.put(copied(Path(folder).resolve() / str(number)))
        began, first = time.monotonic(), copies.get()
        status, output = run_tests(first, sorted({t for m in chosen for t in m.targets.split()}))
        copies.put(first)
        if status:
            print(f"The tests fail without any mutant, so nothing would be proven:\n{output}")
            return 1
        print(f"{time.monotonic() - began:4.0f} s  all targets pass without a mutant", flush=True)

        def attempt(mutant: Mutant) -> str:
            copy, start = copies.get(), time.monotonic()
            try:
                found = verdict(mutant, copy)
            finally:
                copies.put(copy)
            print(f"{time.monotonic() - start:4.0f} s  {found}: {mutant.name} ({mutant.file})", flush=True)
            return found

        with ThreadPoolExecutor(given.jobs) as pool:
            found = list(pool.map(attempt, chosen))
    marked = [m for m, result in zip(chosen, found, strict=True) if result == "killed" and m.survives]
    wrong = [m for m, result in zip(chosen, found, strict=True) if result == "survived" or "does not apply" in result]
    for word in ("killed", "survived", "survives, as marked", "does not apply"):
        print(f"{sum(result.startswith(word) for result in found):4}  {word}")
    for folder in sorted({mutant.file.split("/")[0] for mutant in chosen}):
        inside = [result for m, result in zip(chosen, found, strict=True) if m.file.startswith(f"{folder}/")]
        print(f"{inside.count('killed')} of {len(inside)} killed in {folder}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes for {len(chosen)} mutants")
    for mutant in wrong:
        print(f"not killed: {mutant.name} [{mutant.formula}] {mutant.file}")
    for mutant in marked:
        print(f"killed now, so take its mark away: {mutant.name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
