"use strict";
// The charts. Text from records passes through `plain`, since Plotly would read some markup in it.

const LIGHT = ["#0072b2", "#d98200", "#009e73", "#d55e00", "#b8538f", "#3498d1", "#222222", "#808080"];
const DARK = ["#4fa8e0", "#f0b040", "#34c9a0", "#f58f52", "#e3a0c8", "#9bd2f7", "#f2f2f2", "#9a9a9a"];
const DASHES = { solid: "", dash: "7 4", dashdot: "8 3 2 3", dot: "2 3", longdash: "13 4", longdashdot: "13 3 2 3" };
const HATCHES = ["", "/", "\\", "-", "x", "|"];
const NAMES = Object.keys(DASHES);
const dark = () => document.documentElement.dataset.theme === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => (dark() ? DARK : LIGHT)[index % LIGHT.length];
// Eight colours with six dashes each: the first lines differ in both, and no two of the first 48 agree in both.
const dashOf = (index) => NAMES[(index + Math.floor(index / LIGHT.length)) % NAMES.length];
const faint = (hex) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},0.15)`;
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
const tick = (text, at) => plain(text.length > 18 ? `${text.slice(0, 16)}… (${at})` : text);
const whole = (values) => (Math.max(...values) < 6 ? { dtick: 1 } : {}); // no half rounds on an axis of a few
const wide = (values) => values.length > 0 && Math.min(...values) > 0 && Math.max(...values) > 20 * Math.min(...values);

// On a log scale more than a few ticks would be digits on top of each other.
function axis(title, more = {}) {
  return { title: { text: title, standoff: 8, font: { size: 12 } }, gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"), nticks: more.type === "log" ? 4 : 0, ...more };
}

// Labels may push only the margin beside them: one that pushes along its own axis moves the ticks, and with them the reason to push.
function layout(x, y, more = {}) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 16, t: 12, b: 40 }, showlegend: false,
    font: { family: "system-ui, sans-serif", size: 11, color: css("--text") }, xaxis: { ...x, automargin: "bottom" }, yaxis: { ...y, automargin: "left" }, hovermode: "closest",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") }, namelength: -1 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", ...more,
  };
}

const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

async function plot(id, about, traces, shape, empty) {
  const box = byId(id);
  const nothing = !traces.some((trace) => (trace.z || trace.y || []).length);
  if (nothing) {
    if (box.data) Plotly.purge(box);
    box.replaceChildren(empty || "Nothing to draw yet.");
  } else {
    if (box.classList.contains("empty")) box.replaceChildren();
    box.classList.remove("empty");
    if (!box.data && !printing) {
      const mine = wave;
      await Plotly.react(box, traces.slice(0, 1), { ...shape }, CONFIG); // the axes and one line first, the others in the next task
      await pause();
      if (mine !== wave) return;
    }
    await Plotly.react(box, traces, shape, CONFIG);
  }
  box.classList.toggle("empty", nothing);
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", about);
}

const UNIT_AXES = { rounds: ["round", {}], seconds: ["simulated seconds", {}], bytes: ["bytes, up and down", { tickformat: "~s", ticksuffix: "B" }] };

function line(group, x, y, more = {}) {
  return { type: "scatter", mode: y.length === 1 ? "markers" : "lines", name: plain(group.label), x, y, line: { color: colour(group.index), dash: dashOf(group.index), width: 2 }, marker: { color: colour(group.index), size: 8 }, ...more };
}

function band(group, x, curve) {
  if (!curve.low || x.length < 2) return [];
  const area = { fill: "toself", fillcolor: faint(colour(group.index)), line: { width: 0 }, mode: "lines" };
  return [{ ...area, type: "scatter", x: [...x, ...[...x].reverse()], y: [...curve.high, ...[...curve.low].reverse()], hoverinfo: "skip" }];
}

function drawCurves(measure) {
  const lines = shown();
  const [title, more] = UNIT_AXES[view.unit];
  const log = measure === "loss" && useLog();
  const y = axis("", measure === "accuracy" ? { tickformat: ".0%", hoverformat: ".2%" } : { type: log ? "log" : "linear", hoverformat: ".4~g", exponentformat: "power" });
  const traces = [...lines.flatMap((group) => band(group, group[measure].x[view.unit], group[measure])), ...lines.map((group) => line(group, group[measure].x[view.unit], group[measure].mean))];
  const few = lines.length <= 8 && view.unit === "rounds";
  const x = view.unit === "rounds" ? whole(lines.map((group) => group[measure].x.rounds.at(-1) || 0)) : more;
  const shape = layout(axis(title, x), y, { hovermode: few ? "x unified" : "closest", uirevision: `${scene().dataset} ${view.unit} ${log}` });
  return plot(measure, `${measure} against ${UNITS[view.unit]}, ${lines.length} lines; the table below has the numbers`, traces, shape, "No line is shown: press one in the legend.");
}

function useLog() {
  const values = groups().flatMap((group) => group.loss.mean).filter((value) => value !== null);
  if (view.log === null) view.log = wide(values);
  byId("log").checked = view.log;
  return view.log;
}

function drawReach() {
  const levels = scene().levels.map((level) => `${Math.round(100 * level)} %`);
  const [title, more] = UNIT_AXES[view.unit];
  const traces = levels.length ? shown().map((group) => ({ type: "bar", name: plain(group.label), x: levels, y: group.reach[view.unit], marker: { color: colour(group.index), pattern: { shape: HATCHES[NAMES.indexOf(dashOf(group.index))], fillmode: "overlay", solidity: 0.2, size: 7, fgcolor: css("--back"), fgopacity: 0.7 } } })) : [];
  const some = view.unit === "rounds" ? whole(shown().flatMap((group) => group.reach.rounds)) : more;
  const y = axis(view.unit === "rounds" ? "rounds" : title, { ...some, hoverformat: ".4~s", rangemode: "tozero" });
  return plot("reach", `Cost in ${UNITS[view.unit]} to reach accuracy levels; the table below has the numbers`, traces, layout(axis("test accuracy", { type: "category", fixedrange: true }), y, { barmode: "group", bargap: 0.25, uirevision: view.unit }), " ");
}

function drawHeat() {
  const heat = run() ? run().heat : null;
  const labels = heat ? heat.devices.map(tick) : [];
  const middle = css("--middle");
  const scale = dark() ? [[0, "#ff9d4d"], [0.5, middle], [1, "#63b8ff"]] : [[0, "#c45508"], [0.5, middle], [1, "#0a5ea8"]];
  const traces = !heat || !labels.length ? [] : [
    { type: "heatmap", x: heat.rounds, y: labels, z: heat.values, zmin: -heat.limit, zmax: heat.limit, colorscale: scale, hoverongaps: false, hovertemplate: "round %{x}<br>device %{y}<br>weight %{z:.4~g}<extra></extra>", colorbar: { thickness: 9, outlinewidth: 0, xpad: 4, exponentformat: "power" } },
    { type: "scatter", mode: "markers", x: heat.left_out.map((mark) => mark[0]), y: heat.left_out.map((mark) => labels[mark[1]]), marker: { symbol: "x-thin", size: 6, line: { width: 1.5, color: css("--text") } }, hovertemplate: "round %{x}<br>device %{y}<br>left out<extra></extra>" },
  ];
  const many = heat && heat.of > labels.length ? ` Shown are the ${labels.length} of ${heat.of} devices that took part most often.` : "";
  const means = heat && heat.per_column > 1 ? ` A column is the mean over about ${heat.per_column} rounds.` : "";
  byId("heat-note").textContent = `Blue adds a device's update, orange subtracts it; empty where the device was not selected; × where it was left out.${many}${means}`;
  return plot("heat", "Weights of devices by rounds", traces, layout(axis("round"), axis("device", { type: "category", categoryorder: "array", categoryarray: labels }), { uirevision: run()?.label }), "No device has a weight in this run.");
}

function drawStage(at) {
  const stages = run() ? run().stages : [];
  const values = stages.flatMap((stage) => stage.weights).concat([0]);
  const pad = 0.05 * (Math.max(...values) - Math.min(...values) || 1);
  const stage = stages[at];
  const traces = !stage ? [] : [{ type: "bar", x: stage.devices.map(tick), y: stage.weights, marker: { color: stage.weights.map((weight) => (weight < 0 ? (dark() ? "#ff9d4d" : "#c45508") : (dark() ? "#63b8ff" : "#0a5ea8"))) }, hovertemplate: "device %{x}<br>weight %{y:.4~g}<extra></extra>" }];
  const even = stage ? 1 / stage.weights.length : 0;
  const shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: even, y1: even, line: { dash: "dot", width: 1.5, color: css("--soft") } }];
  const y = axis(at ? "" : "weight", { range: [Math.min(...values) - pad, Math.max(...values) + pad], fixedrange: true, exponentformat: "power" });
  const x = axis(stage ? `devices of round ${stage.round}` : "", { type: "category", showticklabels: stage && stage.devices.length <= 16, fixedrange: true });
  return plot(`stage-${at}`, stage ? `Weights in round ${stage.round}` : "No such stage", traces, layout(x, y, { shapes }), " ");
}

function drawPromise() {
  const promise = run() ? run().promise : { of: 0, rounds: [], failed: [] };
  const kept = promise.of - promise.failures;
  byId("promise-note").textContent = promise.of ? `The bound promises that the loss changes by at most the dotted line. It held in ${kept} of ${promise.of} rounds${promise.failures ? "; diamonds mark where it did not (the β used is below the curvature that the step met, or the gradient was estimated)" : ""}.` : "This run has no promises: its rule came without a gradient or without a smoothness.";
  const one = { type: "scatter", mode: promise.rounds.length === 1 ? "markers" : "lines", x: promise.rounds };
  const traces = !promise.of ? [] : [
    { ...one, name: "promised at most", y: promise.promised, line: { dash: "dot", width: 2, color: colour(1) } },
    { ...one, name: "measured", y: promise.measured, line: { width: 2, color: colour(0) } },
    { type: "scatter", mode: "markers", name: "promise failed", x: promise.failed.map((mark) => mark[0]), y: promise.failed.map((mark) => mark[1]), marker: { symbol: "diamond", size: 8, color: css("--bad") }, visible: promise.failed.length > 0 },
  ];
  const shape = layout(axis("round", whole(promise.rounds.slice(-1))), axis("change of the loss", { hoverformat: ".4~g", exponentformat: "power" }), { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, margin: { l: 48, r: 16, t: 56, b: 40 }, uirevision: run()?.label });
  return plot("promise", byId("promise-note").textContent, traces, shape, " ");
}

function drawHealth(id, parts) {
  const traces = shown().flatMap((group) => parts.map(([name, more]) => line(group, group.health[name].rounds, group.health[name].values, { name: plain(parts.length > 1 ? `${group.label}: ${name}` : group.label), ...more(group) })));
  const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null);
  const positive = values.length > 0 && Math.min(...values) > 0;
  const log = positive && (id === "condition" || wide(values));
  const shape = layout(axis("round"), axis("", { type: log ? "log" : "linear", hoverformat: ".4~g", exponentformat: "power" }), { uirevision: `${scene().dataset} ${log}` });
  return plot(id, `${id} against rounds`, traces, shape, "Nothing to draw: no rule shown here measured it.");
}

const DRAW = [
  () => drawCurves("loss"),
  () => drawCurves("accuracy"),
  drawReach,
  drawHeat,
  () => drawStage(0),
  () => drawStage(1),
  () => drawStage(2),
  drawPromise,
  () => drawHealth("condition", [["condition", () => ({})]]),
  () => drawHealth("smoothness", [["smoothness", () => ({})], ["curvature", (group) => ({ line: { color: colour(group.index), dash: "dot", width: 1 } })]]),
];

let wave = 0;
let printing = false;
const pause = () => new Promise((resume) => setTimeout(resume));
// One chart a task, so that the page answers in between; a newer wave ends an older one.
async function drawAll() {
  if (!window.Plotly) return;
  wave += 1;
  const mine = wave;
  document.body.dataset.drawn = "no";
  for (const draw of DRAW) {
    await pause();
    if (mine !== wave) return;
    await draw();
    if (mine !== wave) return;
  }
  document.body.dataset.drawn = "yes";
}

// Plotly waits in the page as plain text. A browser reads and compiles a script from a blob beside the page, which is there and usable meanwhile.
function loadPlotly() {
  const url = URL.createObjectURL(new Blob([byId("plotly").textContent], { type: "text/javascript" }));
  const script = make("script", { src: url, async: true });
  const done = () => { URL.revokeObjectURL(url); script.remove(); };
  script.onload = () => { done(); drawAll(); };
  script.onerror = () => { done(); runPlotly(); drawAll(); }; // where the page is shown by something that allows no blobs
  document.head.append(script);
}

function runPlotly() {
  if (!window.Plotly) document.head.append(make("script", { textContent: byId("plotly").textContent }));
}

// Once the words and tables can be seen; a page in the background is not painted, and need not wait for it.
function whenPainted(next) {
  if (document.hidden) next();
  else requestAnimationFrame(() => setTimeout(next));
}

function forPrint(width) {
  for (const box of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(box, width ? { width: box.id.startsWith("stage") ? width / 3.2 : width } : { width: null, autosize: true });
}
// Paper does not wait: what is not drawn yet is drawn at once, and in light colours.
let before = null;
window.addEventListener("beforeprint", () => {
  before = { theme: document.documentElement.dataset.theme, drawn: document.body.dataset.drawn };
  printing = true;
  wave += 1;
  document.documentElement.dataset.theme = "light";
  runPlotly();
  if (before.theme !== "light" || before.drawn !== "yes") DRAW.forEach((draw) => draw());
  forPrint(680);
});
window.addEventListener("afterprint", () => {
  printing = false;
  forPrint(null);
  if (before.theme !== "light") setTheme(before.theme);
  else if (before.drawn !== "yes") drawAll();
});

begin();
