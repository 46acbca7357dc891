"use strict";
// The page's words, tables and controls. All text from records goes in as text (`textContent`), never as markup.

let page = JSON.parse(document.getElementById("data").textContent);
const view = { scene: "", unit: "rounds", log: null, hidden: new Set(), baseline: "", run: "", sort: { column: -1, down: false }, theme: null };
const UNITS = { rounds: "rounds", seconds: "simulated seconds", bytes: "bytes" };
const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// What the choices stand for; a choice that is gone (another data set) falls back to a sensible one.
const scene = () => page.scenes.find((each) => each.dataset === view.scene) || page.scenes[0];
const groups = () => scene().groups;
const shown = () => groups().map((group, index) => ({ ...group, index })).filter((group) => !view.hidden.has(group.label));
const baseline = () => groups().find((group) => group.label === view.baseline) || groups().find((group) => group.label.startsWith("fedavg")) || groups()[0];
const weighed = () => scene().runs.filter((each) => each.stages.length);
const run = () => scene().runs.find((each) => each.label === view.run) || weighed().find((each) => each.label.includes("contextual")) || weighed()[0] || scene().runs[0];

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(digits - 2);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}
const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
function cost(value, unit) {
  if (value === null) return "–";
  if (unit === "seconds") return `${number(value, 3)} s`;
  if (unit !== "bytes") return number(value, 4);
  const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${number(value / 1000 ** power, 3)} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
}

function fillSelect(select, values, chosen) {
  if ([...select.options].map((option) => option.value).join("\n") !== values.join("\n")) {
    select.replaceChildren(...values.map((value) => make("option", { value, textContent: value })));
  }
  select.value = chosen;
}

function writeHead() {
  byId("headline").textContent = scene().sentences[0];
  byId("outcome").textContent = scene().sentences[1];
  const status = byId("status");
  status.hidden = !page.running;
  document.body.classList.toggle("running", Boolean(page.running));
  if (page.running && status.textContent !== page.running) status.textContent = page.running;
  const problems = byId("problems");
  problems.hidden = !page.problems.length;
  problems.firstChild.textContent = page.problems.length === 1 ? "One thing could not be used" : `${page.problems.length} things could not be used`;
  problems.lastChild.replaceChildren(...page.problems.map((text) => make("li", { textContent: text })));
  byId("scene-choice").hidden = page.scenes.length < 2;
  fillSelect(byId("scene"), page.scenes.map((each) => each.dataset), scene().dataset);
  fillSelect(byId("baseline"), groups().map((group) => group.label), baseline().label);
  fillSelect(byId("run"), scene().runs.map((each) => each.label), run() ? run().label : "");
}

function writeLegend() {
  const legend = byId("legend");
  const focus = legend.contains(document.activeElement) ? document.activeElement.dataset.label : null;
  legend.replaceChildren(...groups().map((group, index) => {
    const button = make("button", { type: "button" }, swatch(index), make("span", { textContent: group.label }));
    button.dataset.label = group.label;
    button.setAttribute("aria-pressed", String(!view.hidden.has(group.label)));
    button.addEventListener("click", () => {
      if (!view.hidden.delete(group.label)) view.hidden.add(group.label);
      button.setAttribute("aria-pressed", String(!view.hidden.has(group.label)));
      drawAll();
    });
    return button;
  }));
  if (focus !== null) [...legend.children].find((button) => button.dataset.label === focus)?.focus();
}

function swatch(index) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", "26");
  svg.setAttribute("height", "10");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const shape = { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour(index), "stroke-width": 3, "stroke-dasharray": DASHES[dashOf(index)] };
  for (const [key, value] of Object.entries(shape)) line.setAttribute(key, value);
  svg.append(line);
  return svg;
}

// The table: plain columns, then one for each accuracy level in the unit chosen.
function columns() {
  const own = [
    ["algorithm", (g) => g.label, (g) => g.label],
    ["final loss", (g) => g.final.loss, (g) => number(g.final.loss)],
    ["final accuracy", (g) => g.final.accuracy, (g) => percent(g.final.accuracy)],
    ["swing", (g) => g.final.swing, (g) => number(g.final.swing, 2)],
    ["loss rose", (g) => g.final.rises, (g) => percent(g.final.rises)],
    ["promise held", (g) => g.final.kept, (g) => percent(g.final.kept)],
  ];
  return own.concat(scene().levels.map((level, at) => [`to ${Math.round(100 * level)} %`, (g) => g.reach[view.unit][at], (g) => cost(g.reach[view.unit][at], view.unit), at]));
}

function sorted(rows, pick, down) {
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  const last = (value) => value === null || value === undefined;
  return [...rows].sort((a, b) => last(pick(a)) - last(pick(b)) || (last(pick(a)) ? 0 : (down ? -1 : 1) * order(pick(a), pick(b))));
}

function writeTable() {
  const [head, body] = byId("results").children;
  const all = columns();
  const focus = head.contains(document.activeElement) ? document.activeElement.textContent : null;
  head.replaceChildren(make("tr", {}, ...all.map(([title], at) => {
    const button = make("button", { type: "button", textContent: title });
    button.addEventListener("click", () => {
      view.sort = { column: at, down: view.sort.column === at && !view.sort.down };
      writeTable();
    });
    const cell = make("th", { scope: "col", className: at ? "number" : "" }, button);
    cell.setAttribute("aria-sort", view.sort.column === at ? (view.sort.down ? "descending" : "ascending") : "none");
    return cell;
  })));
  const picked = all[view.sort.column];
  const rows = picked ? sorted(groups(), picked[1], view.sort.down) : groups();
  body.replaceChildren(...rows.map((group) => row(group, all)));
  if (focus !== null) [...head.querySelectorAll("button")].find((button) => button.textContent === focus)?.focus();
  byId("reach-note").textContent = scene().levels.length ? `Cost in ${UNITS[view.unit]} until the test accuracy first reached each level.` : "No accuracy level was reached.";
}

function row(group, all) {
  const cells = all.map(([, , text, level], at) => {
    const cell = make(at ? "td" : "th", { className: at ? "number" : "", textContent: text(group) });
    if (!at) cell.scope = "row";
    const mine = level === undefined ? null : group.reach[view.unit][level];
    const theirs = level === undefined ? null : baseline().reach[view.unit][level];
    if (mine !== null && theirs) cell.append(make("small", { textContent: `${(mine / theirs).toFixed(2)}×` }));
    return cell;
  });
  return make("tr", { className: group === baseline() ? "baseline" : "" }, ...cells);
}

function writeRun() {
  const left = run() ? run().left_out : { rows: [], more: 0, lost: "" };
  const cells = ([device, why, count, which]) => make("tr", {}, ...[device, why, count, which].map((value, at) => make("td", { textContent: value, className: at === 2 ? "number" : "" })));
  byId("left").lastChild.replaceChildren(...left.rows.map(cells));
  byId("left").parentElement.hidden = !left.rows.length;
  const more = left.more ? ` ${left.more} more rows are not shown.` : "";
  const lost = left.lost ? ` Too few answered in round ${left.lost}, and the model was kept.` : "";
  byId("left-note").textContent = (left.rows.length ? "Devices that were asked and whose updates were not applied." : "No device was left out.") + more + lost;
}

function writeRepeats() {
  byId("versions").textContent = page.versions.length ? `Made with ${page.versions.join(", ")}.` : "";
  byId("repeat-note").textContent = scene().comparable ? "Save as repeat.toml, then: fedcontext compare repeat.toml" : "The settings of these runs, as their own program wrote them down.";
  const texts = [...byId("repeats").querySelectorAll("pre")].map((pre) => pre.textContent);
  if (texts.join("\n\n") === scene().repeats.join("\n\n")) return;
  byId("repeats").replaceChildren(...scene().repeats.map((text) => {
    const button = make("button", { type: "button", textContent: "Copy" });
    button.addEventListener("click", async () => {
      button.textContent = (await copied(text)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    const pre = make("pre", { textContent: text, tabIndex: 0 });
    return make("div", { className: "copy" }, button, pre);
  }));
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function writeAll() {
  writeHead();
  writeLegend();
  writeTable();
  writeRun();
  writeRepeats();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  writeLegend();
  drawAll();
}

// While the runs go on, a script beside the page brings the news: pages from disk may load scripts, and nothing else.
function news(content) {
  const live = page.live;
  page = { ...content, live };
  writeAll();
  drawAll();
}

function listen() {
  if (!page.live || !page.running) return;
  const script = make("script", { src: `${encodeURIComponent(page.live)}?${Date.now()}` });
  const again = () => { script.remove(); setTimeout(listen, 1000); };
  script.onload = again;
  script.onerror = again;
  document.head.append(script);
}
let heard = 0;
window.fedcontextNews = (count, content) => { if (count > heard) { heard = count; news(content); } };

function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => setTheme(view.theme || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", follow);
  byId("theme").addEventListener("click", () => { view.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; follow(); });
  byId("scene").addEventListener("change", (event) => { view.scene = event.target.value; view.log = null; writeAll(); drawAll(); });
  byId("baseline").addEventListener("change", (event) => { view.baseline = event.target.value; writeTable(); });
  byId("run").addEventListener("change", (event) => { view.run = event.target.value; writeRun(); drawAll(); });
  byId("log").addEventListener("change", (event) => { view.log = event.target.checked; drawAll(); });
  for (const radio of document.querySelectorAll("[name=unit]")) radio.addEventListener("change", () => { view.unit = radio.value; writeTable(); drawAll(); });
  follow();
  writeAll();
  listen();
}
