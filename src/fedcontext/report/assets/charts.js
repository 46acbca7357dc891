"use strict";
// The charts. Text from records goes through `escapeMarkup`, because Plotly interprets some HTML and LaTeX.

const LIGHT = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000", "#999999"]; // those of paper/figures.py
const DARK = ["#4fa8e0", "#f0b040", "#34c9a0", "#f58f52", "#e3a0c8", "#9bd2f7", "#f2f2f2", "#9a9a9a"];
const DASHES = { solid: "", dash: "7 4", dashdot: "8 3 2 3", dot: "2 3", longdash: "13 4", longdashdot: "13 3 2 3" };
const HATCHES = ["", "/", "\\", "-", "x", "|"];
const DASH_NAMES = Object.keys(DASHES);
const dark = () => document.documentElement.dataset.theme === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => (dark() ? DARK : LIGHT)[index % LIGHT.length];
// 8 colours and 6 dashes: no two of the first 48 lines share both.
const dashOf = (index) => DASH_NAMES[((index % LIGHT.length) + Math.floor(index / LIGHT.length)) % DASH_NAMES.length];
const translucent = (hex) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},0.15)`;
const escapeMarkup = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
const tickLabel = (text, index) => escapeMarkup(text.length > 18 ? `${text.slice(0, 16)}… (${index})` : text);
const integerTicks = (rounds) => (Math.max(...rounds) - Math.min(...rounds) < 6 ? { dtick: 1 } : {}); // no ticks at fractions of a round
const spansDecades = (values) => values.length > 0 && Math.min(...values) > 0 && Math.max(...values) > 20 * Math.min(...values);

// More than a few ticks on a log axis would overlap.
function axis(title, options = {}) {
  return { title: { text: title, standoff: 8, font: { size: 12 } }, gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"), nticks: options.type === "log" ? 4 : 0, ...options };
}

// Labels may only widen the margin beside them: otherwise Plotly alternates between two layouts.
function layout(x, y, options = {}) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 16, t: 12, b: 40 }, showlegend: false,
    font: { family: "system-ui, sans-serif", size: 11, color: css("--text") }, xaxis: { ...x, automargin: "bottom" }, yaxis: { ...y, automargin: "left" }, hovermode: "closest",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") }, namelength: -1 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", ...options,
  };
}

// Plotly shows its toolbar all the time where nothing can hover, on top of the curves.
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: !matchMedia("(hover: none)").matches && "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

async function plot(id, description, traces, chartLayout, emptyText = "Nothing to draw yet.") {
  const box = byId(id);
  const empty = !traces.some((trace) => (trace.z || trace.y || []).some((value) => value !== null));
  if (empty) {
    if (box.data) Plotly.purge(box);
    box.replaceChildren(emptyText);
  } else {
    if (box.classList.contains("empty")) box.replaceChildren();
    box.classList.remove("empty"); // before drawing, since it changes the size
    await Plotly.react(box, traces, chartLayout, CONFIG);
  }
  box.classList.toggle("empty", empty);
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", description);
}

const UNIT_AXES = { rounds: ["round", {}], seconds: ["seconds", {}], bytes: ["bytes, up and down", { tickformat: "~s", ticksuffix: "B" }] };

function line(group, x, y, options = {}) {
  return { type: "scatter", mode: y.length === 1 ? "markers" : "lines", name: escapeMarkup(group.label), x, y, line: { color: colour(group.index), dash: dashOf(group.index), width: 2 }, marker: { color: colour(group.index), size: 8 }, ...options };
}

function band(group, x, curve) {
  if (!curve.low || x.length < 2) return [];
  const area = { fill: "toself", fillcolor: translucent(colour(group.index)), line: { width: 0 }, mode: "lines" };
  return [{ ...area, type: "scatter", x: [...x, ...[...x].reverse()], y: [...curve.high, ...[...curve.low].reverse()], hoverinfo: "skip" }];
}

function drawCurves(measure) {
  const lines = visibleGroups();
  const [title, axisOptions] = UNIT_AXES[view.unit];
  const log = measure === "loss" && useLog();
  const y = axis("", measure === "accuracy" ? { tickformat: ".0%", hoverformat: ".2%" } : { type: log ? "log" : "linear", hoverformat: ".4~g", exponentformat: "power" });
  const traces = [...lines.flatMap((group) => band(group, group[measure].x[view.unit], group[measure])), ...lines.map((group) => line(group, group[measure].x[view.unit], group[measure].mean))];
  const unified = lines.length <= 8 && view.unit === "rounds";
  const x = view.unit === "rounds" ? integerTicks(lines.flatMap((group) => group[measure].x.rounds)) : axisOptions;
  const chartLayout = layout(axis(title, x), y, { hovermode: unified ? "x unified" : "closest", uirevision: `${dataset().name} ${view.unit} ${log}` });
  return plot(measure, `${measure} against ${UNITS[view.unit]}, ${lines.length} lines; see the table below for the numbers`, traces, chartLayout, !lines.length ? "All lines are hidden: select one in the legend." : page.status ? undefined : `No ${measure} is recorded: evaluate the model in some rounds (in Flower with evaluate_fn, or fraction_evaluate above 0).`);
}

function useLog() {
  const values = groups().flatMap((group) => group.loss.mean).filter((value) => value !== null);
  if (view.log === null) view.log = spansDecades(values);
  byId("log").checked = view.log;
  return view.log;
}

function drawMilestones() {
  const levels = dataset().levels.map(levelName);
  const [title, axisOptions] = UNIT_AXES[view.unit];
  const traces = levels.length ? visibleGroups().map((group) => ({ type: "bar", name: escapeMarkup(group.label), x: levels, y: group.milestones[view.unit], marker: { color: colour(group.index), pattern: { shape: HATCHES[DASH_NAMES.indexOf(dashOf(group.index))], fillmode: "overlay", solidity: 0.2, size: 7, fgcolor: css("--back"), fgopacity: 0.7 } } })) : [];
  const ticks = view.unit === "rounds" ? integerTicks([0, ...visibleGroups().flatMap((group) => group.milestones.rounds)]) : axisOptions;
  const y = axis(view.unit === "rounds" ? "rounds" : title, { ...ticks, hoverformat: ".4~s", rangemode: "tozero" });
  return plot("milestones", `Cost in ${UNITS[view.unit]} to reach accuracy levels; see the table below for the numbers`, traces, layout(axis("test accuracy", { type: "category", fixedrange: true }), y, { barmode: "group", bargap: 0.25, uirevision: view.unit }), " ");
}

const signColours = () => (dark() ? ["#ff9d4d", "#63b8ff"] : ["#c45508", "#0a5ea8"]); // negative, positive

function drawHeatmap() {
  const heatmap = selectedRun()?.heatmap ?? { rounds: [], devices: [], excluded: [] };
  const labels = heatmap.devices.map(tickLabel);
  const [negative, positive] = signColours();
  const colorscale = [[0, negative], [0.5, css("--middle")], [1, positive]];
  const traces = !labels.length ? [] : [
    { type: "heatmap", x: heatmap.rounds, y: labels, z: heatmap.values, zmin: -heatmap.limit, zmax: heatmap.limit, colorscale, hoverongaps: false, hovertemplate: "round %{x}<br>device %{y}<br>weight %{z:.4~g}<extra></extra>", colorbar: { thickness: 9, outlinewidth: 0, xpad: 4, exponentformat: "power" } },
    { type: "scatter", mode: "markers", x: heatmap.excluded.map((mark) => mark[0]), y: heatmap.excluded.map((mark) => labels[mark[1]]), marker: { symbol: "x-thin", size: 6, line: { width: 1.5, color: css("--text") } }, hovertemplate: "round %{x}<br>device %{y}<br>excluded<extra></extra>" },
  ];
  const subset = heatmap.device_count > labels.length ? ` Shown are the ${labels.length} of ${heatmap.device_count} devices that were selected most often.` : "";
  const means = heatmap.rounds_per_column > 1 ? ` A column is the mean over about ${heatmap.rounds_per_column} rounds.` : "";
  byId("heatmap-note").textContent = `Blue weights are positive, orange ones negative; cells are empty where a device was not selected; × marks excluded devices.${subset}${means}`;
  return plot("heatmap", "Weights of devices by rounds", traces, layout(axis("round", integerTicks(heatmap.rounds)), axis("device", { type: "category", categoryorder: "array", categoryarray: labels }), { uirevision: selectedRun()?.label }), "No device has a weight in this run.");
}

function drawStage(index) {
  const stages = selectedRun()?.stages ?? [];
  const values = stages.flatMap((stage) => stage.weights).concat([0]);
  const padding = 0.05 * (Math.max(...values) - Math.min(...values) || 1);
  const stage = stages[index];
  const [negative, positive] = signColours();
  const traces = !stage ? [] : [{ type: "bar", x: stage.devices.map(tickLabel), y: stage.weights, marker: { color: stage.weights.map((weight) => (weight < 0 ? negative : positive)) }, hovertemplate: "device %{x}<br>weight %{y:.4~g}<extra></extra>" }];
  const equal = stage ? 1 / stage.weights.length : 0;
  const shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: equal, y1: equal, line: { dash: "dot", width: 1.5, color: css("--soft") } }];
  const y = axis(index ? "" : "weight", { range: [Math.min(...values) - padding, Math.max(...values) + padding], fixedrange: true, exponentformat: "power" });
  const x = axis(stage ? `devices of round ${stage.round}` : "", { type: "category", showticklabels: stage && stage.devices.length <= 16, fixedrange: true });
  return plot(`stage-${index}`, stage ? `Weights in round ${stage.round}` : "No such round", traces, layout(x, y, { shapes }), " ");
}

function drawBound() {
  const bound = selectedRun()?.bound ?? { checked: 0, violated: 0, rounds: [], violations: [] };
  const cause = bound.violated ? "; diamonds mark violations (β was below the curvature along the step, or the gradient was estimated)" : "";
  const note = bound.checked ? `The bound promises that the loss changes by at most the dotted line. It held in ${bound.checked - bound.violated} of ${bound.checked} rounds${cause}.` : "This run has no bound: its rule had no gradient or no smoothness.";
  byId("bound-note").textContent = note;
  const curve = { type: "scatter", mode: bound.rounds.length === 1 ? "markers" : "lines", x: bound.rounds };
  const traces = !bound.checked ? [] : [
    { ...curve, name: "promised at most", y: bound.promised, line: { dash: "dot", width: 2, color: colour(1) } },
    { ...curve, name: "measured", y: bound.measured, line: { width: 2, color: colour(0) } },
    { type: "scatter", mode: "markers", name: "violation", x: bound.violations.map((mark) => mark[0]), y: bound.violations.map((mark) => mark[1]), marker: { symbol: "diamond", size: 8, color: css("--bad") }, visible: bound.violations.length > 0 },
  ];
  const chartLayout = layout(axis("round", integerTicks(bound.rounds)), axis("loss change", { hoverformat: ".4~g", exponentformat: "power" }), { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, margin: { l: 48, r: 16, t: 56, b: 40 }, uirevision: selectedRun()?.label });
  return plot("bound", note, traces, chartLayout, " ");
}

function drawDiagnostics(id, names) {
  const traces = visibleGroups().flatMap((group) => names.map((name) => {
    const { rounds, values } = group.diagnostics[name];
    const dotted = name === "curvature" ? { line: { color: colour(group.index), dash: "dot", width: 1 } } : {};
    return line(group, rounds, values, { name: escapeMarkup(names.length > 1 ? `${group.label}: ${name}` : group.label), ...dotted });
  }));
  const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null);
  const log = values.length > 0 && Math.min(...values) > 0 && (id === "condition" || spansDecades(values));
  const chartLayout = layout(axis("round", integerTicks(traces.flatMap((trace) => trace.x))), axis("", { type: log ? "log" : "linear", hoverformat: ".4~g", exponentformat: "power" }), { uirevision: `${dataset().name} ${log}` });
  return plot(id, `${id} against rounds`, traces, chartLayout, "Nothing to draw: none of these rules measured it.");
}

const CHARTS = [
  () => drawCurves("loss"),
  () => drawCurves("accuracy"),
  drawMilestones,
  drawHeatmap,
  () => drawStage(0),
  () => drawStage(1),
  () => drawStage(2),
  drawBound,
  () => drawDiagnostics("condition", ["condition"]),
  () => drawDiagnostics("smoothness", ["smoothness", "curvature"]),
];

// One chart per task keeps the page responsive; a newer call cancels an older one.
let latestDraw = 0;
async function drawAll() {
  if (!window.Plotly) return;
  latestDraw += 1;
  const thisDraw = latestDraw;
  document.body.dataset.drawn = "no";
  for (const draw of CHARTS) {
    await new Promise((resume) => setTimeout(resume));
    if (thisDraw !== latestDraw) return;
    await draw();
    if (thisDraw !== latestDraw) return;
  }
  document.body.dataset.drawn = "yes";
}

// Printing does not wait: draw what is missing at once, in light colours and in the width of the paper.
function setChartWidth(width) {
  for (const box of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(box, width ? { width: box.id.startsWith("stage") ? width / 3.2 : width } : { width: null, autosize: true });
}
let beforePrint = null;
window.addEventListener("beforeprint", () => {
  beforePrint = { theme: document.documentElement.dataset.theme, drawn: document.body.dataset.drawn };
  latestDraw += 1;
  document.documentElement.dataset.theme = "light";
  if (beforePrint.theme !== "light" || beforePrint.drawn !== "yes") CHARTS.forEach((draw) => draw());
  setChartWidth(680);
});
window.addEventListener("afterprint", () => {
  setChartWidth(null);
  if (beforePrint.theme !== "light") setTheme(beforePrint.theme);
  else if (beforePrint.drawn !== "yes") drawAll();
});

start();
