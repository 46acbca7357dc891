"use strict";
// Text, tables and controls. All text from records is inserted with `textContent`, never as markup.

let page = JSON.parse(document.getElementById("data").textContent);
const view = { dataset: "", unit: "rounds", log: null, hidden: new Set(), baseline: "", run: "", sort: { column: -1, descending: false }, theme: null };
const UNITS = { rounds: "rounds", seconds: "seconds", bytes: "bytes" };
const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// The current selections; one that does not exist (in another data set) falls back to a default.
const dataset = () => page.datasets.find((each) => each.name === view.dataset) || page.datasets[0];
const groups = () => dataset().groups;
const visibleGroups = () => groups().map((group, index) => ({ ...group, index })).filter((group) => !view.hidden.has(group.label));
const baseline = () => groups().find((group) => group.label === view.baseline) || groups().find((group) => group.label.startsWith("fedavg")) || groups()[0];
function selectedRun() {
  const { runs } = dataset();
  const weighted = runs.filter((run) => run.stages.length);
  return runs.find((run) => run.label === view.run) || weighted.find((run) => run.label.includes("contextual")) || weighted[0] || runs[0];
}

function formatNumber(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(digits - 2);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}
const levelName = (level) => `${Number((100 * level).toPrecision(6))} %`;
const formatPercent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
function formatCost(value, unit) {
  if (value === null) return "–";
  if (unit === "seconds") return `${formatNumber(value, 3)} s`;
  if (unit !== "bytes") return formatNumber(value, 4);
  const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${formatNumber(value / 1000 ** power, 3)} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
}

function fillSelect(select, values, selected) {
  if ([...select.options].map((option) => option.value).join("\n") !== values.join("\n")) {
    select.replaceChildren(...values.map((value) => element("option", { value, textContent: value })));
  }
  select.value = selected;
}

function writeHead() {
  byId("headline").textContent = dataset().sentences[0];
  byId("outcome").textContent = dataset().sentences[1];
  byId("findings").hidden = !dataset().findings.length;
  byId("findings").replaceChildren(...dataset().findings.map((text) => element("li", { textContent: text })));
  const status = byId("status");
  status.hidden = !page.status;
  document.body.classList.toggle("running", Boolean(page.status));
  if (page.status && status.textContent !== page.status) status.textContent = page.status;
  const problems = byId("problems");
  problems.hidden = !page.problems.length;
  problems.firstChild.textContent = page.problems.length === 1 ? "1 problem with the files" : `${page.problems.length} problems with the files`;
  problems.lastChild.replaceChildren(...page.problems.map((text) => element("li", { textContent: text })));
  byId("dataset-choice").hidden = page.datasets.length < 2;
  fillSelect(byId("dataset"), page.datasets.map((each) => each.name), dataset().name);
  fillSelect(byId("baseline"), groups().map((group) => group.label), baseline().label);
  fillSelect(byId("run"), dataset().runs.map((run) => run.label), selectedRun()?.label ?? "");
}

function writeLegend() {
  const legend = byId("legend");
  const focused = legend.contains(document.activeElement) ? document.activeElement.dataset.label : null;
  legend.replaceChildren(...groups().map((group, index) => {
    const button = element("button", { type: "button", title: group.full_label }, swatch(index), element("span", { textContent: group.label }));
    button.dataset.label = group.label;
    button.setAttribute("aria-pressed", String(!view.hidden.has(group.label)));
    button.addEventListener("click", () => {
      if (!view.hidden.delete(group.label)) view.hidden.add(group.label);
      button.setAttribute("aria-pressed", String(!view.hidden.has(group.label)));
      drawAll();
    });
    return button;
  }));
  if (focused !== null) [...legend.children].find((button) => button.dataset.label === focused)?.focus();
}

function swatch(index) {
  const svgElement = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const svg = svgElement("svg", { width: 26, height: 10, "aria-hidden": "true" });
  svg.append(svgElement("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour(index), "stroke-width": 3, "stroke-dasharray": DASHES[dashOf(index)] }));
  return svg;
}

// Columns of the table of results: title, value to sort by, text; then one column per accuracy level.
function columns() {
  const fixed = [
    ["algorithm", (g) => g.label, (g) => g.label],
    ["final loss", (g) => g.final.loss, (g) => formatNumber(g.final.loss)],
    ["final accuracy", (g) => g.final.accuracy, (g) => formatPercent(g.final.accuracy)],
    ["swing", (g) => g.final.swing, (g) => formatNumber(g.final.swing, 2)],
    ["loss rose", (g) => g.final.rises, (g) => formatPercent(g.final.rises)],
    ["bound held", (g) => g.final.bound_held, (g) => formatPercent(g.final.bound_held)],
  ];
  return fixed.concat(dataset().levels.map((level, index) => {
    const value = (group) => group.milestones[view.unit][index];
    return [`to ${levelName(level)}`, value, (group) => formatCost(value(group), view.unit), "ratio"];
  }));
}

function sortRows(rows, valueOf, descending) {
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  const missing = (value) => value === null || value === undefined; // always last
  return [...rows].sort((a, b) => missing(valueOf(a)) - missing(valueOf(b)) || (missing(valueOf(a)) ? 0 : (descending ? -1 : 1) * order(valueOf(a), valueOf(b))));
}

function writeTable() {
  const [head, body] = byId("results").children;
  const all = columns();
  const focused = head.contains(document.activeElement) ? document.activeElement.textContent : null;
  head.replaceChildren(element("tr", {}, ...all.map(([title], index) => {
    const button = element("button", { type: "button", textContent: title });
    button.addEventListener("click", () => {
      view.sort = { column: index, descending: view.sort.column === index && !view.sort.descending };
      writeTable();
    });
    const cell = element("th", { scope: "col", className: index ? "number" : "" }, button);
    cell.setAttribute("aria-sort", view.sort.column === index ? (view.sort.descending ? "descending" : "ascending") : "none");
    return cell;
  })));
  const sortBy = all[view.sort.column];
  const rows = sortBy ? sortRows(groups(), sortBy[1], view.sort.descending) : groups();
  body.replaceChildren(...rows.map((group) => tableRow(group, all)));
  if (focused !== null) [...head.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
  byId("milestones-note").textContent = groups().some((group) => group.milestones.rounds.some((value) => value !== null)) ? `Median ${UNITS[view.unit]} over seeds until the test accuracy first reached each level.` : "No accuracy level was reached.";
}

function tableRow(group, all) {
  const cells = all.map(([, valueOf, textOf, ratio], index) => {
    const cell = element(index ? "td" : "th", { className: index ? "number" : "", textContent: textOf(group) });
    if (!index) cell.scope = "row";
    if (ratio && valueOf(group) !== null && valueOf(baseline())) cell.append(element("small", { textContent: `${(valueOf(group) / valueOf(baseline())).toFixed(2)}×` }));
    return cell;
  });
  return element("tr", { className: group === baseline() ? "baseline" : "" }, ...cells);
}

function writeRun() {
  const { rows, more, lost } = selectedRun()?.excluded ?? { rows: [], more: 0, lost: "" };
  const tableCells = (values) => values.map((value, index) => element("td", { textContent: value, className: index === 2 ? "number" : "" }));
  byId("excluded").lastChild.replaceChildren(...rows.map((values) => element("tr", {}, ...tableCells(values))));
  byId("excluded").parentElement.hidden = !rows.length;
  const summary = rows.length ? "Selected devices whose updates were not applied." : "No device was excluded.";
  const hidden = more ? ` ${more} more rows are not shown.` : "";
  const kept = lost ? ` Rounds with too few replies, in which the model was kept: ${lost}.` : "";
  byId("excluded-note").textContent = summary + hidden + kept;
}

function writeConfigs() {
  byId("versions").textContent = page.versions.length ? `Made with ${page.versions.join(", ")}.` : "";
  byId("configs-note").textContent = dataset().reproducible ? "Save as config.toml, then run: fedcontext compare config.toml" : "The settings of these runs, as recorded by the program that ran them.";
  const texts = [...byId("configs").querySelectorAll("pre")].map((pre) => pre.textContent);
  if (texts.join("\n\n") === dataset().configs.join("\n\n")) return;
  byId("configs").replaceChildren(...dataset().configs.map((text) => {
    const button = element("button", { type: "button", textContent: "Copy" });
    button.addEventListener("click", async () => {
      button.textContent = (await copy(text)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    return element("div", { className: "copy" }, button, element("pre", { textContent: text, tabIndex: 0 }));
  }));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // pages opened from disk may lack the clipboard API
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

function writeAll() {
  writeHead();
  writeLegend();
  writeTable();
  writeRun();
  writeConfigs();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  writeLegend();
  drawAll();
}

// While the runs are in progress, poll the script beside the page: a page from disk may load scripts but not read files.
function poll() {
  if (!page.live || !page.status) return;
  const script = element("script", { src: `${encodeURIComponent(page.live)}?${Date.now()}` });
  script.onload = script.onerror = () => { script.remove(); setTimeout(poll, 1000); };
  document.head.append(script);
}
let lastUpdate = 0;
window.fedcontextUpdate = (time, data) => {
  if (time <= lastUpdate) return;
  lastUpdate = time;
  page = { ...data, live: page.live };
  writeAll();
  drawAll();
};

function start() {
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const applyTheme = () => setTheme(view.theme || (prefersDark.matches ? "dark" : "light"));
  const onChange = (id, handler) => byId(id).addEventListener("change", (event) => handler(event.target));
  prefersDark.addEventListener("change", applyTheme);
  byId("theme").addEventListener("click", () => { view.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; applyTheme(); });
  onChange("dataset", (select) => { view.dataset = select.value; view.log = null; writeAll(); drawAll(); });
  onChange("baseline", (select) => { view.baseline = select.value; writeTable(); });
  onChange("run", (select) => { view.run = select.value; writeRun(); drawAll(); });
  onChange("log", (box) => { view.log = box.checked; drawAll(); });
  for (const radio of document.querySelectorAll("[name=unit]")) radio.addEventListener("change", () => { view.unit = radio.value; writeTable(); drawAll(); });
  applyTheme();
  writeAll();
  poll();
}
