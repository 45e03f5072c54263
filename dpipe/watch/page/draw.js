"use strict";
// Drawing: from values to elements. Texts may come from other machines: they become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const known = (value) => value !== null && value !== undefined;
const percent = (share) => (share > 0 && share < 0.005 ? "<1%" : `${Math.round(100 * share)}%`);

function rounded(value, digits = 3) {
  return Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
}

function duration(seconds) {
  if (seconds < 1) return `${rounded(1000 * seconds)} ms`;
  if (seconds < 100) return `${rounded(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function megabytes(mb) {
  if (mb < 1000) return `${rounded(mb)} MB`;
  return mb < 1e6 ? `${rounded(mb / 1e3)} GB` : `${rounded(mb / 1e6)} TB`;
}

function gigabits(gbps) {
  return gbps < 1 ? `${rounded(1000 * gbps)} Mbit/s` : `${rounded(gbps)} Gbit/s`;
}

function smoothed(values) {
  // An exponential mean over a hundredth of the run, begun without bias (Kingma and Ba 2015).
  const keep = 1 - 1 / Math.max(3, values.length / 100);
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (!known(value)) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

// The map: a row of cards a replica, and between two stages the links there and back.

function bar(share, over = false) {
  const fill = element("i");
  fill.style.width = `${Math.min(100, 100 * share)}%`;
  return element("span", { class: over ? "bar over" : "bar", "aria-hidden": "true" }, fill);
}

function meter(text, share) {
  return element("span", { class: "meter" }, text, known(share) ? bar(share, share > 0.9) : "");
}

function card(seats) {
  const [first] = seats;
  const ranks = seats.length === 1 ? `rank ${first.rank}` : `ranks ${first.rank}–${seats.at(-1).rank}`;
  const binds = seats.some((seat) => seat.binds);
  const node = element("div", { class: binds ? "seat binds" : "seat" }, element("strong", {}, first.machine ?? ranks));
  const under = [first.machine ? ranks : null, first.layers, first.note].filter(Boolean).join(" · ");
  if (under) node.append(element("span", { class: "muted" }, under));
  if (binds) node.append(" ", element("span", { class: "tag" }, "binds"));
  for (const seat of seats) {
    if (known(seat.busy)) {
      const computes = element("span", { class: "meter" }, `computes ${percent(seat.busy)}`, bar(seat.busy));
      node.append(computes);
    }
    if (known(seat.memory_mb)) {
      const limited = known(seat.limit_mb);
      const held = limited ? `${rounded(seat.memory_mb / 1e3, 2)} of ${rounded(seat.limit_mb / 1e3)} GB` : megabytes(seat.memory_mb);
      node.append(meter(`memory ${held}`, limited ? seat.memory_mb / seat.limit_mb : null));
    }
  }
  return node;
}

function way(link, arrow) {
  const name = arrow === "→" ? "there" : "back";
  const full = known(link.full) ? percent(link.full) : "";
  const line = element("span", { class: "way" },
    element("span", {}, element("span", { "aria-hidden": "true" }, `${arrow} `), element("span", { class: "hidden" }, name),
      `${rounded(link.mb_per_s)} MB/s`),
    element("span", { class: link.binds ? "tag" : "muted" }, link.binds ? `${full} binds` : full));
  const node = element("span", { class: link.binds ? "binds" : "", title: `${link.source} → ${link.target}` }, line);
  if (known(link.full)) node.append(bar(link.full));
  return node;
}

const RELAYED = "Neither end can dial the other: the coordinator's machine passes on what they send.";

function hop(there, back) {
  const node = element("div", { class: "hop" });
  for (const link of there) node.append(way(link, "→"));
  for (const link of back) node.append(way(link, "←"));
  if ([...there, ...back].some((link) => link.relayed)) {
    node.append(element("span", { class: "relayed", title: RELAYED }, "relayed"));
  }
  const stated = [...there, ...back].find((link) => known(link.rate_gbps));
  if (stated) {
    node.append(element("span", { class: "stated" }, `${gigabits(stated.rate_gbps)} · ${rounded(stated.delay_ms)} ms`));
  }
  return node;
}

function drawMap(into, seats, links) {
  const drawn = new Set();
  const between = (from, to) => links.filter((link) => {
    const fits = from.some((seat) => String(seat.rank) === link.source) && to.some((seat) => String(seat.rank) === link.target);
    if (fits) drawn.add(link);
    return fits;
  });
  const replicas = Map.groupBy ? Map.groupBy(seats, (seat) => seat.replica) : grouped(seats, "replica");
  into.replaceChildren();
  for (const [replica, members] of replicas) {
    const row = element("div", { class: "pipeline", role: "group", "aria-label": `pipeline ${replica}` });
    if (replicas.size > 1) row.append(element("h3", {}, `replica ${replica}`));
    const cells = [...grouped(members, "stage").values()];
    cells.forEach((cell, index) => {
      row.append(card(cell));
      const next = cells[index + 1];
      if (next) row.append(hop(between(cell, next), between(next, cell)));
    });
    into.append(row);
  }
  const others = links.filter((link) => !drawn.has(link));
  if (others.length) into.append(linkTable(others, seats.length ? "Other links" : "Links"));
}

function grouped(values, key) {
  const groups = new Map();
  for (const value of values) {
    if (!groups.has(value[key])) groups.set(value[key], []);
    groups.get(value[key]).push(value);
  }
  return groups;
}

function linkTable(links, title) {
  const cells = (tag, texts) => element("tr", {}, ...texts.map((text) => element(tag, {}, text)));
  const rows = links.map((link) => cells("td", [
    `${link.source} → ${link.target}${link.relayed ? " (relayed)" : ""}`, `${rounded(link.mb_per_s)} MB/s`,
    known(link.rate_gbps) ? gigabits(link.rate_gbps) : "–", known(link.delay_ms) ? `${rounded(link.delay_ms)} ms` : "–",
    known(link.full) ? percent(link.full) : "–",
  ]));
  return element("table", {}, element("caption", {}, title),
    element("thead", {}, cells("th", ["link", "sends", "rate", "delay", "full"])), element("tbody", {}, ...rows));
}

// One step: two rows a rank, as measured and as predicted.

const LANE_KINDS = { forward: "forward", backward: "backward", weight: "weight gradient", update: "optimizer", send: "sends" };

function drawLanes(into, legend, lanes) {
  const left = 58, height = 17, low = 8, gap = 15, width = Math.max(560, into.clientWidth || 1000);
  const ends = lanes.ranks.flatMap((rank) => [...rank.measured, ...rank.predicted].map((each) => each[3]));
  const longest = Math.max(1e-6, ...ends), scale = (width - left - 8) / longest;
  const tall = lanes.ranks.some((rank) => rank.measured.length);
  const pitch = (tall ? height + 3 : 0) + low + (tall ? 2 : 8) + gap;
  const total = lanes.ranks.length * pitch + 22;
  const said = known(lanes.measured_ms) ? `measured ${rounded(lanes.measured_ms)} ms, ` : "";
  const svg = element("svg:svg", {
    viewBox: `0 0 ${width} ${total}`, role: "img",
    "aria-label": `What each of ${lanes.ranks.length} ranks does in a step: ${said}predicted ${rounded(lanes.predicted_ms)} ms`,
  });
  for (const at of ticks(longest)) {
    const x = left + at * scale;
    svg.append(element("svg:line", { class: "tick", x1: x, x2: x, y1: 0, y2: total - 18 }),
      element("svg:text", { x, y: total - 5, "text-anchor": x > width - 40 ? "end" : "middle" }, at ? `${rounded(at)} ms` : "0"));
  }
  lanes.ranks.forEach((rank, index) => {
    const y = index * pitch + 3;
    svg.append(element("svg:text", { x: 0, y: y + 12 }, `rank ${rank.rank}`));
    const place = { left, scale };
    if (tall) {
      svg.append(element("svg:rect", { class: "lane", x: left, y, width: width - left - 8, height, rx: 2 }));
      drawBars(svg, rank.measured, { ...place, y, height, sendAt: y + height });
    }
    const under = tall ? y + height + 5 : y;
    drawBars(svg, rank.predicted, { ...place, y: under, height: tall ? low : low + 6, predicted: tall });
  });
  into.replaceChildren(svg);
  const kinds = new Set(lanes.ranks.flatMap((rank) => [...rank.measured, ...rank.predicted].map((each) => each[0])));
  // What was sent is drawn of a measured step alone.
  if (!tall) kinds.delete("send");
  const shown = Object.entries(LANE_KINDS).filter(([kind]) => kinds.has(kind));
  legend.replaceChildren(...shown.map(([kind, name]) => element("li", {},
    element("svg:svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, element("svg:rect", { class: kind, width: 10, height: 10, rx: 2 })), name)));
  if (tall) legend.append(element("li", {}, "pale: predicted"));
}

function drawBars(svg, bars, { left, scale, y, height, sendAt, predicted }) {
  for (const [kind, label, start, end] of bars) {
    if (kind === "send" && sendAt === undefined) continue;
    const sends = kind === "send", x = left + start * scale, wide = Math.max(0.7, (end - start) * scale - 0.6);
    const rect = element("svg:rect", {
      class: predicted ? `${kind} predicted` : kind, x: x.toFixed(2), y: sends ? sendAt + 1 : y,
      width: wide.toFixed(2), height: sends ? 2 : height, rx: sends || wide < 3 ? 0 : 1.5,
    }, element("svg:title", {}, `${label}${predicted ? ", predicted" : ""}: ${rounded(end - start)} ms, from ${rounded(start, 4)} ms`));
    svg.append(rect);
    if (!sends && !predicted && wide > 22 && height > 12) {
      svg.append(element("svg:text", { class: "on", x: (x + wide / 2).toFixed(2), y: y + height - 5, "text-anchor": "middle" }, label.replace(/^\d+/, "")));
    }
  }
}

function ticks(longest) {
  const rough = longest / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(longest / step) + 1 }, (_, index) => index * step);
}
