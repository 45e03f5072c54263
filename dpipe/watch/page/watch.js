"use strict";
// The page: events come in, figures and charts follow.

const STEP = 0, ELAPSED = 1, LOSS = 2, HELD_OUT = 3, SPEED = 4, SENT = 5; // of a point, see picture.py
const OVER = {
  step: { index: STEP, text: (value) => `step ${value}`, tick: (value) => rounded(value, 6) },
  elapsed_s: { index: ELAPSED, text: duration, tick: duration },
  sent_mb: { index: SENT, text: (value) => `${megabytes(value)} sent`, tick: megabytes },
};
const CHARTS = {
  loss: [
    { name: "loss", colour: "forward", of: LOSS, faint: true },
    { name: "smoothed", colour: "forward", of: LOSS, smooth: true, width: 2 },
    { name: "held out", colour: "backward", of: HELD_OUT, width: 2, dots: true },
  ],
  speed: [
    { name: "tokens/s", colour: "forward", of: SPEED, faint: true },
    { name: "smoothed", colour: "forward", of: SPEED, smooth: true, width: 2 },
  ],
};

const byId = (id) => document.getElementById(id);
let points = [];
let picture = null;
let over = "step";
const charts = {};

function columns(series) {
  const wanted = points.filter((point) => series.some((each) => known(point[each.of])));
  return [wanted.map((point) => point[OVER[over].index]), ...series.map((each) => {
    const values = wanted.map((point) => point[each.of]);
    return each.smooth ? smoothed(values) : values;
  })];
}

function makeChart(id) {
  const into = byId(id), series = CHARTS[id];
  charts[id]?.destroy();
  const axis = {
    stroke: cssColour("muted"), font: "11px system-ui, sans-serif", grid: { stroke: cssColour("line"), width: 1 },
    ticks: { show: false },
  };
  const options = {
    width: into.clientWidth, height: into.clientHeight, legend: { show: false }, padding: [8, 10, 0, 0],
    cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false } },
    axes: [
      { ...axis, values: (_, values) => values.map((value) => OVER[over].tick(value)), space: 70, size: 26 },
      { ...axis, size: 48, values: (_, values) => values.map((value) => rounded(value, 4)) },
    ],
    series: [{}, ...series.map((each) => ({
      stroke: cssColour(each.colour) + (each.faint ? "55" : ""), width: each.width ?? 1, spanGaps: true,
      points: { show: Boolean(each.dots), size: 6, fill: cssColour("card") },
    }))],
    hooks: { setCursor: [() => readOut(id)] },
  };
  charts[id] = new uPlot(options, columns(series), into);
  readOut(id);
}

function readOut(id) {
  const chart = charts[id];
  if (!chart) return;
  const [xs, ...ys] = chart.data, at = chart.cursor.idx ?? xs.length - 1;
  const readout = byId(`${id}-readout`);
  if (at < 0) {
    readout.textContent = "no step yet";
    return;
  }
  const parts = [OVER[over].text(xs[at])];
  CHARTS[id].forEach((series, index) => {
    const value = known(ys[index][at]) || chart.cursor.idx !== null && known(chart.cursor.idx) ? ys[index][at] : ys[index].findLast(known);
    if (known(value)) parts.push(" · ", `${series.name} `, element("b", {}, rounded(value, 4)));
  });
  readout.replaceChildren(...parts);
}

function drawCharts() {
  for (const id of Object.keys(CHARTS)) {
    if (charts[id]) {
      charts[id].setData(columns(CHARTS[id]));
      readOut(id);
    } else {
      makeChart(id);
    }
  }
}

function moveCursor(id, event) {
  const chart = charts[id], last = chart.data[0].length - 1;
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
  if (!(event.key in steps) || last < 0) return;
  event.preventDefault();
  const at = Math.min(last, Math.max(0, (chart.cursor.idx ?? last) + steps[event.key]));
  chart.setCursor({ left: chart.valToPos(chart.data[0][at], "x"), top: 10 });
  byId(`${id}-readout`).setAttribute("aria-live", "polite");
}

const STATES = { waiting: "waiting", training: "training", silent: "silent", finished: "finished", unreachable: "no answer" };

function figures() {
  const p = picture, shown = [];
  const add = (name, value, under) => shown.push(element("div", {}, element("dt", {}, name), element("dd", {}, value, under ? element("small", {}, under) : "")));
  if (known(p.loss)) add("Loss", rounded(p.loss, 4));
  if (known(p.held_out_loss)) add("Held-out loss", rounded(p.held_out_loss, 4));
  if (known(p.tokens_per_s)) add("Tokens a second", rounded(p.tokens_per_s));
  if (known(p.step_s)) add("Step", duration(p.step_s), known(p.predicted_step_s) ? `predicted ${duration(p.predicted_step_s)}` : "");
  if (known(p.bubble)) add("Bubble", percent(p.bubble), "mean of all ranks");
  if (known(p.goodput)) add("Goodput", percent(p.goodput), "of the steps made");
  if (known(p.eta_s)) add("Time left", duration(p.eta_s), known(p.elapsed_s) ? `${duration(p.elapsed_s)} so far` : "");
  else if (known(p.elapsed_s)) add("Time", duration(p.elapsed_s), "of training");
  if (known(p.price)) add("Price so far", rounded(p.price), `${rounded(p.price_per_hour)} an hour`);
  byId("figures").replaceChildren(...shown);
}

function show() {
  const p = picture;
  for (const node of document.querySelectorAll("[data-figure]")) node.textContent = p[node.dataset.figure] ?? "";
  document.title = known(p.step) && p.steps ? `${percent(p.step / p.steps)} ${p.name}` : p.name;
  setState(p.state, p.detail);
  const bar = byId("progress");
  const share = known(p.step) && p.steps ? p.step / p.steps : 0;
  bar.setAttribute("aria-valuemax", p.steps ?? 1);
  bar.setAttribute("aria-valuenow", p.step ?? 0);
  bar.firstElementChild.style.width = `${100 * share}%`;
  byId("progress-text").textContent = known(p.step) && p.steps ? `${p.step.toLocaleString("en")} of ${p.steps.toLocaleString("en")} steps` : "";
  figures();
  byId("map-section").hidden = !(p.seats.length || p.links.length);
  drawMap(byId("map"), p.seats, p.links);
  showLanes();
  byId("events-section").hidden = !p.events.length;
  byId("events").replaceChildren(...p.events.toReversed().map((event) => element("li", {}, element("time", {}, event.at), element("span", {}, event.text))));
  byId("notes").replaceChildren(...p.notes.map((note) => element("li", {}, note)));
}

let lanesDrawn = "";

function showLanes() {
  const lanes = picture.lanes;
  byId("lanes-section").hidden = !lanes;
  // Not drawn again for each step: a reader may point at a bar.
  const content = JSON.stringify(lanes) + byId("lanes").clientWidth;
  if (!lanes || content === lanesDrawn) return;
  lanesDrawn = content;
  const measured = known(lanes.measured_ms) ? `step ${lanes.step}: measured ${rounded(lanes.measured_ms)} ms, ` : "not traced yet: ";
  const more = lanes.left_out ? `; ${lanes.left_out} more ranks` : "";
  byId("lanes-text").textContent = `${measured}predicted ${rounded(lanes.predicted_ms)} ms${more}`;
  drawLanes(byId("lanes"), byId("lanes-legend"), lanes);
}

function setState(state, detail) {
  document.querySelector(".state").dataset.state = state;
  const text = detail ? `${STATES[state] ?? state}. ${detail}` : STATES[state] ?? state;
  // Only where it changes: a screen reader says it each time.
  if (byId("state").textContent !== text) byId("state").textContent = text;
}

function listen() {
  // A report holds what a page would be sent; see report.py.
  const kept = byId("report");
  if (kept) {
    ({ points, picture } = JSON.parse(kept.textContent));
    drawCharts();
    show();
    return;
  }
  const source = new EventSource("/events");
  source.addEventListener("begin", (event) => { points = JSON.parse(event.data); drawCharts(); });
  source.addEventListener("points", (event) => { points.push(...JSON.parse(event.data)); drawCharts(); });
  source.addEventListener("picture", (event) => { picture = JSON.parse(event.data); show(); });
  source.addEventListener("error", () => setState("unreachable", "dpipe watch does not answer; this page tries again."));
}

function start() {
  for (const id of Object.keys(CHARTS)) byId(id).addEventListener("keydown", (event) => moveCursor(id, event));
  byId("over").addEventListener("change", (event) => { over = event.target.value; drawCharts(); });
  const redraw = () => {
    Object.keys(charts).forEach(makeChart);
    if (picture) showLanes();
  };
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  drawCharts();
  listen();
}

start();
