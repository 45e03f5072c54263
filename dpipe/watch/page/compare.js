"use strict";
// Several runs over each other, from what report.py has put into the page.

const runs = JSON.parse(document.getElementById("report").textContent);
const COLOURS = ["forward", "backward", "update", "good", "bad", "wait", "send"];
const DASHES = [[], [6, 4], [2, 3]]; // told apart also without colours, and beyond seven runs
const AXES = { 0: (value) => rounded(value, 6), 1: duration, 5: megabytes, price: (value) => rounded(value) };
let over = "0";
let chart = null;

function across(run, point) {
  return over === "price" ? (point[1] / 3600) * run.picture.price_per_hour : point[Number(over)];
}

// By the value that a chart is over: uPlot wants it once and rising.
function table(run, of, smooth) {
  const points = run.points.filter((point) => known(point[of]));
  const values = points.map((point) => point[of]);
  return [points.map((point) => across(run, point)), smooth ? smoothed(values) : values];
}

function drawLoss() {
  const into = document.getElementById("loss");
  chart?.destroy();
  const shown = over === "price" ? runs.filter((run) => known(run.picture.price_per_hour)) : runs;
  const tables = shown.flatMap((run) => [table(run, 2, true), table(run, 3, false)]);
  const look = (run) => {
    const index = runs.indexOf(run);
    return { stroke: cssColour(COLOURS[index % COLOURS.length]), dash: DASHES[Math.floor(index / COLOURS.length) % 3] };
  };
  const series = shown.flatMap((run) => [
    { ...look(run), width: 2, spanGaps: true, points: { show: false } },
    { ...look(run), width: 0, spanGaps: true, points: { show: true, size: 6, fill: cssColour("card") } },
  ]);
  const axis = { stroke: cssColour("muted"), font: "11px system-ui, sans-serif", grid: { stroke: cssColour("line"), width: 1 }, ticks: { show: false } };
  chart = new uPlot({
    width: into.clientWidth, height: into.clientHeight, legend: { show: false }, padding: [8, 10, 0, 0],
    scales: { x: { time: false } }, cursor: { y: false },
    axes: [{ ...axis, size: 26, space: 70, values: (_, values) => values.map(AXES[over]) }, { ...axis, size: 48 }],
    series: [{}, ...series],
  }, uPlot.join(tables), into);
}

function drawTable() {
  const cells = (tag, texts) => element("tr", {}, ...texts.map((text) => element(tag, {}, text)));
  const text = (value, form) => (known(value) ? form(value) : "–");
  const rows = runs.map(({ picture: p }) => cells("td", [
    p.name, `${text(p.step, String)} of ${text(p.steps, String)}`, text(p.loss, (value) => rounded(value, 4)),
    text(p.held_out_loss, (value) => rounded(value, 4)), text(p.step_s, duration), text(p.elapsed_s, duration), text(p.sent_mb, megabytes), text(p.price, rounded),
  ]));
  document.getElementById("table").append(element("table", {}, element("thead", {},
    cells("th", ["run", "steps", "loss", "held out", "step", "time", "sent", "price"])), element("tbody", {}, ...rows)));
}

function drawLegend() {
  document.getElementById("legend").append(...runs.map((run, index) => element("li", {},
    element("svg:svg", { viewBox: "0 0 10 10", "aria-hidden": "true" },
      element("svg:rect", { class: COLOURS[index % COLOURS.length], width: 10, height: 10, rx: 2 })), run.picture.name)));
}

document.getElementById("priced").hidden = !runs.some((run) => known(run.picture.price_per_hour));
document.getElementById("over").addEventListener("change", (event) => { over = event.target.value; drawLoss(); });
addEventListener("resize", drawLoss);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawLoss);
drawLegend();
drawTable();
drawLoss();
