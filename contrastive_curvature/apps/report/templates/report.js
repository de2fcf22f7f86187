"use strict";
// Draws the charts from the numbers in #data, and again when their width changes; the slider moves the threshold.
const data = JSON.parse(document.getElementById("data").textContent);

function add(parent, tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
}

const asPercent = (share) => `${+(100 * share).toFixed(2)} %`;
const asNumber = (value) => `${+value.toPrecision(3)}`;

// Axes with labels; returns the scales, and where to draw.
function frame(box, { x, y, xLabel, xText, yText, height }) {
  const width = box.clientWidth;
  const tall = height ?? Math.max(220, Math.min(320, width * 0.6));
  const [left, right, top, bottom] = [52, 10, 10, 44];
  box.replaceChildren();
  const svg = add(box, "svg", { viewBox: `0 0 ${width} ${tall}`, height: tall, "aria-hidden": "true" });
  const toX = (value) => left + ((value - x[0]) / (x[1] - x[0])) * (width - left - right);
  const toY = (value) => tall - bottom - ((value - y[0]) / (y[1] - y[0])) * (tall - top - bottom);
  for (const value of ticks(y[0], y[1], 4)) {
    add(svg, "line", { class: "grid", x1: left, x2: width - right, y1: toY(value), y2: toY(value) });
    add(svg, "text", { x: left - 8, y: toY(value) + 4, "text-anchor": "end" }, yText(value));
  }
  for (const value of ticks(x[0], x[1], Math.max(2, width / 110))) {
    add(svg, "text", { x: toX(value), y: tall - bottom + 18, "text-anchor": "middle" }, xText(value));
  }
  add(svg, "line", { class: "axis", x1: left, x2: width - right, y1: tall - bottom, y2: tall - bottom });
  add(svg, "text", { x: (left + width - right) / 2, y: tall - 6, "text-anchor": "middle" }, xLabel);
  return { svg, toX, toY, left, right: width - right, top, bottom: tall - bottom };
}

const path = (points, f) => "M" + points.map(([x, y]) => `${f.toX(x).toFixed(1)},${f.toY(y).toFixed(1)}`).join("L");

const charts = {
  novelty(box) {
    const { edges, known, unknown } = data.thresholds;
    const most = Math.max(...known, ...(unknown ?? [])) * 1.05;
    const f = frame(box, {
      x: [edges[0], edges.at(-1)], y: [0, most], xLabel: "novelty: larger is less like known inputs",
      xText: asNumber, yText: asPercent, height: Math.max(230, Math.min(300, box.clientWidth * 0.6)),
    });
    const shade = add(f.svg, "rect", { class: "flagged", y: f.top, height: f.bottom - f.top });
    for (const [shares, name] of [[known, "known"], [unknown ?? [], "unknown"]]) {
      shares.forEach((share, i) => {
        const [from, to] = [f.toX(edges[i]), f.toX(edges[i + 1])];
        const bar = { class: name, x: from + 0.5, width: Math.max(0.5, to - from - 1), y: f.toY(share), height: f.bottom - f.toY(share) };
        if (share > 0) add(f.svg, "rect", bar);
      });
    }
    const line = add(f.svg, "line", { class: "threshold", y1: f.top, y2: f.bottom });
    const says = add(f.svg, "text", { class: "says", y: f.top + 12 });
    box.moveTo = (step) => {
      const at = step.novelty === null ? f.right : Math.min(f.right, Math.max(f.left, f.toX(step.novelty)));
      line.setAttribute("x1", at);
      line.setAttribute("x2", at);
      shade.setAttribute("x", at);
      shade.setAttribute("width", Math.max(0, f.right - at));
      const tight = f.right - at < 90;
      says.setAttribute("x", tight ? at - 8 : at + 8);
      says.setAttribute("text-anchor", tight ? "end" : "start");
      says.textContent = step.novelty === null ? "nothing is flagged" : tight ? "flagged ▸" : "flagged →";
    };
    showStep();
  },

  tradeoff(box) {
    const points = data.thresholds.steps.map((step) => [step.known, step.unknown]);
    const last = Math.max(0.01, points.at(-1)[0]);
    const f = frame(box, { x: [0, last], y: [0, 1], xLabel: "known inputs flagged", xText: asPercent, yText: asPercent, height: 230 });
    add(f.svg, "path", { class: "found", d: path(points, f) });
    const dot = add(f.svg, "circle", { class: "chosen", r: 7 });
    box.moveTo = (step) => {
      dot.setAttribute("cx", f.toX(step.known));
      dot.setAttribute("cy", f.toY(step.unknown));
    };
    showStep();
  },

  sparsification(box) {
    const { curve, best_curve: best } = data.sparsification;
    const lowest = Math.min(...curve.map((point) => point[1]), ...best.map((point) => point[1]));
    const f = frame(box, {
      x: [0, 1], y: [lowest < 1 ? Math.max(0, lowest - 0.15 * (1 - lowest)) : 0, 1], xLabel: "share of queries taken away",
      xText: asPercent, yText: asPercent,
    });
    add(f.svg, "line", { class: "flat", x1: f.left, x2: f.right, y1: f.toY(curve[0][1]), y2: f.toY(curve[0][1]) });
    add(f.svg, "path", { class: "best", d: path(best, f) });
    add(f.svg, "path", { class: "ours", d: path(curve, f) });
  },

  reliability(box) {
    const { bins } = data.reliability;
    const total = bins.reduce((sum, bin) => sum + bin.count, 0);
    const f = frame(box, { x: [0, 1], y: [0, 1], xLabel: "confidence (share of votes for the winner)", xText: asPercent, yText: asPercent });
    for (const { low, high, accuracy: right } of bins) {
      add(f.svg, "rect", { class: "bin", x: f.toX(low) + 1, width: f.toX(high) - f.toX(low) - 2, y: f.toY(right), height: f.bottom - f.toY(right) });
    }
    add(f.svg, "line", { class: "flat", x1: f.left, x2: f.right, y1: f.bottom, y2: f.toY(1) });
    for (const { count, confidence, accuracy: right } of bins) {
      const dot = add(f.svg, "circle", { class: "dot", cx: f.toX(confidence), cy: f.toY(right), r: 3.5 + 7 * Math.sqrt(count / total) });
      add(dot, "title", {}, `${count} inputs: confidence ${asPercent(confidence)}, right ${asPercent(right)}`);
    }
  },

  det(box) {
    const { curve, n_same: same, n_different: different } = data.det;
    // Rates of 0 lie on the edge, below that of one pair.
    const least = Math.log10(0.5 / Math.max(same, different));
    const asRate = (power) => `${+(100 * 10 ** power).toPrecision(2)} %`;
    const f = frame(box, { x: [least, 0], y: [least, 0], xLabel: "false match rate", xText: asRate, yText: asRate });
    add(f.svg, "line", { class: "flat", x1: f.left, x2: f.right, y1: f.bottom, y2: f.toY(0) });
    add(f.svg, "path", { class: "ours", d: path(curve.map((point) => point.map((rate) => Math.max(least, Math.log10(rate)))), f) });
  },
};

const slider = document.getElementById("alpha");

function showStep() {
  if (!slider) return;
  const says = data.slider[slider.value];
  const texts = {
    "alpha-value": says.alpha, "known-flagged": says.known, "unknown-found": says.unknown ?? "–",
    expected: says.expected, "one-in": says.one_in,
  };
  for (const [id, text] of Object.entries(texts)) document.getElementById(id).textContent = text;
  const found = says.unknown === null ? "" : `, ${says.unknown} of unknown inputs found`;
  slider.setAttribute("aria-valuetext", `alpha ${says.alpha}: ${says.known} of known inputs flagged${found}`);
  for (const box of document.querySelectorAll("[data-chart]")) box.moveTo?.(data.thresholds.steps[slider.value]);
}

slider?.addEventListener("input", showStep);

const redraw = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.clientWidth === target.drawnWidth) continue;
    target.drawnWidth = target.clientWidth;
    charts[target.dataset.chart](target);
  }
});
for (const box of document.querySelectorAll("[data-chart]")) redraw.observe(box);
showStep();
