// The timeline of a Weft report: reading the data, and drawing it. report.js follows in the same block of the page.
// All data comes from the JSON block of the page; names reach it only as text nodes or as canvas text. Rows are drawn
// on a canvas as large as the viewport, and only what is visible is drawn.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("weft-data").textContent);
const chart = $("chart"), space = $("chart-space"), canvas = $("canvas"), tip = $("tip");
const screen = canvas.getContext("2d");
// Everything but what follows the pointer is drawn here once, and copied to the screen when the pointer moves.
const context = document.createElement("canvas").getContext("2d");

// ---- numbers as people read them

const significant = (value) => String(Number(value.toPrecision(4)));

// Times and amounts of a schedule problem have no units.
const plain = (value) => String(Number(value.toPrecision(6)));

function formatTime(seconds) {
  const size = Math.abs(seconds);
  if (data.plain) return plain(seconds);
  if (size === 0) return "0 s";
  if (size >= 1) return significant(seconds) + " s";
  return size >= 1e-3 ? significant(seconds * 1e3) + " ms" : significant(seconds * 1e6) + " us";
}

function formatBytes(bytes) {
  if (data.plain) return plain(bytes);
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024) return significant(value) + " " + unit;
    value /= 1024;
  }
  return significant(value) + " TiB";
}

const percent = (fraction) => Math.round(fraction * 100) + " %";

// ---- from the columns of the JSON block to rows that can be searched by time

const isCompute = data.what.map((what) => what.op === "compute" || what.op === "step");

// Times are multiplied by the factor where they are drawn, and divided by it where they are written.
function readTimeline(item, factor) {
  const unit = item.unit_s * factor;
  const start = Float64Array.from(item.start, (value) => value * unit);
  const end = Float64Array.from(item.duration, (value, index) => (item.start[index] + value) * unit);
  const laneOf = new Uint8Array(start.length);
  const ranks = data.devices.map((_, rank) => {
    const compute = [], communication = [];
    for (let i = data.program.rank_start[rank]; i < data.program.rank_start[rank + 1]; i++) {
      (isCompute[data.program.what[i]] ? compute : communication).push(i);
    }
    return { compute: makeLanes(compute, start, end, laneOf),
             communication: makeLanes(communication, start, end, laneOf), memory: readMemory(item, rank, unit) };
  });
  const steady = item.steady?.map((span) => span && span.map((value) => value * unit));
  const { title, busy } = item;
  return { title, busy, factor, span: item.step_time_s * factor, start, end, laneOf, ranks, steady };
}

// Instructions that overlap in time go to different lanes, so that none hides another. Measured clocks may disagree by
// a little: that is no overlap.
function makeLanes(indices, start, end, laneOf) {
  indices.sort((a, b) => start[a] - start[b] || a - b);
  const slack = 1e-6 * (indices.length ? end[indices[indices.length - 1]] : 0);
  const lanes = [];
  for (const i of indices) {
    let lane = lanes.find((candidate) => candidate.free <= start[i] + slack);
    if (lane === undefined) {
      lane = lanes.length < 12 ? { items: [], latest: [], free: 0 } : lanes[lanes.length - 1];
      if (lane.items.length === 0) lanes.push(lane);
    }
    lane.items.push(i);
    laneOf[i] = lanes.indexOf(lane);
    lane.free = Math.max(lane.free, end[i]);
    lane.latest.push(lane.free);
  }
  return lanes;
}

function readMemory(item, rank, unit) {
  if (!item.memory) return null;
  const { at, bytes } = item.memory[rank];
  let peak = 0;
  for (const value of bytes) peak = Math.max(peak, value);
  return { at: Float64Array.from(at, (value) => value * unit), bytes, peak };
}

// Returns the first position whose value is greater than the limit, in an ascending list.
function firstAbove(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

const fullSpan = Math.max(...data.timelines.map((item) => item.step_time_s)) || 1;
let timelines = data.timelines.map((item) => readTimeline(item, 1));

// Draws all steps as long as the longest, so that their shapes can be compared; or each as long as it is.
function stretchTimelines(isStretched) {
  const factor = (item) => (isStretched && item.step_time_s ? fullSpan / item.step_time_s : 1);
  timelines = data.timelines.map((item) => readTimeline(item, factor(item)));
}

// ---- colours: one hue for each micro-batch; backward is darker than forward

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = {}, colours = new Map();

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["page", "panel", "ink", "soft", "faint", "line", "track", "accent", "warn", "neutral", "forward-l",
                 "backward-l", "weight-l", "chroma", "activations", "warm-up", "cool-down"];
  theme = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  colours = new Map();
}

function hue(microbatch) {
  const step = data.microbatches <= 10 ? 360 / data.microbatches : 137.508;
  return (200 + microbatch * step) % 360;
}

function colourOf(microbatch, shade) {
  if (microbatch < 0) return theme.neutral;
  const key = shade + microbatch;
  let colour = colours.get(key);
  if (colour === undefined) {
    colour = `oklch(${theme[shade + "-l"]} ${theme.chroma} ${hue(microbatch).toFixed(1)})`;
    colours.set(key, colour);
  }
  return colour;
}

// Of a placement: from blue for the first operators of the graph to red for the last; pale off the critical path.
function partColour({ part, strong }) {
  const key = "part " + part + strong;
  let colour = colours.get(key);
  if (colour === undefined) {
    const [lightness, chroma] = strong ? [theme["backward-l"], 0.16] : [`calc(${theme["forward-l"]} + 0.06)`, 0.055];
    colour = `oklch(${lightness} ${chroma} ${(255 - 230 * part).toFixed(1)})`;
    colours.set(key, colour);
  }
  return colour;
}

function shadeOf(what) {
  if (what.phase === "W") return "weight";
  return what.backward ? "backward" : "forward";
}

// ---- what is shown, and where

const view = { from: 0, to: fullSpan, shown: [0], memory: true, communication: true, pointer: null, hover: null };
const AXIS = 28, COMPUTE = 26, COMMUNICATION = 13, MEMORY = 30, GAP = 3, ROW_GAP = 14, LINK_GAP = 6;
const hasMemory = timelines.some((timeline) => timeline.ranks[0]?.memory);
const hasLinkRows = data.devices.some((device) => device.link);
let width = 0, height = 0, gutter = 0;
// Where each row begins, and after them where the last one ends.
let rowTop = [];

// A row that is a link has one thin track; where there are such rows, devices have no track for communication.
function tracksOf(rank) {
  if (data.devices[rank].link) return view.communication ? [["communication", COMMUNICATION]] : [];
  const tracks = [["compute", COMPUTE]];
  if (view.communication && !hasLinkRows) tracks.push(["communication", COMMUNICATION]);
  if (view.memory && hasMemory) tracks.push(["memory", MEMORY]);
  return tracks;
}

const blockHeight = (tracks) => tracks.reduce((sum, [, h]) => sum + h + GAP, -GAP);

function layOut() {
  rowTop = [AXIS + ROW_GAP / 2];
  data.devices.forEach((device, rank) => {
    const tracks = tracksOf(rank), gap = device.link ? LINK_GAP : ROW_GAP;
    const tall = tracks.length ? view.shown.length * (blockHeight(tracks) + 6) - 6 + gap : 0;
    rowTop.push(rowTop[rank] + tall);
  });
  const total = rowTop[data.devices.length];
  space.style.height = total + "px";
  width = chart.clientWidth;
  height = Math.min(total, chart.clientHeight || total);
  gutter = width < 560 ? 70 : 138;
  const ratio = window.devicePixelRatio || 1;
  for (const surface of [context, screen]) {
    surface.canvas.width = Math.round(width * ratio);
    surface.canvas.height = Math.round(height * ratio);
    surface.setTransform(ratio, 0, 0, ratio, 0, 0);
  }
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  requestDraw();
}

const plotWidth = () => Math.max(1, width - gutter - 8);
const toX = (time) => gutter + (time - view.from) / (view.to - view.from) * plotWidth();
const toTime = (x) => view.from + (x - gutter) / plotWidth() * (view.to - view.from);

// Calls visit for each track that is inside the viewport: its device, timeline and place.
function eachTrack(visit) {
  const scroll = chart.scrollTop;
  for (let rank = Math.max(0, firstAbove(rowTop, scroll) - 1); rank < data.devices.length; rank++) {
    const top = rowTop[rank] - scroll, tracks = tracksOf(rank);
    if (top > height) return;
    view.shown.forEach((number, position) => {
      let y = top + position * (blockHeight(tracks) + 6);
      const place = { rank, timeline: timelines[number], number, position, top: y };
      for (const [kind, h] of tracks) {
        if (kind !== "memory" || place.timeline.ranks[rank].memory) visit({ ...place, kind, y, h });
        y += h + GAP;
      }
    });
  }
}

// ---- drawing

let isWaiting = false, isStale = true, drawn = 0;

function requestDraw() {
  isStale = true;
  requestFrame();
}

function requestFrame() {
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => {
    isWaiting = false;
    if (width <= 0 || height <= 0) return;
    if (isStale) draw();
    isStale = false;
    drawPointed();
  });
}

function draw() {
  const began = performance.now();
  drawn = 0;
  context.clearRect(0, 0, width, height);
  const ticks = findTicks();
  drawGrid(ticks);
  clipped(gutter, AXIS, plotWidth(), height - AXIS, () => eachTrack(drawTrack));
  const hasPeriod = data.period && view.shown.some((number) => timelines[number].steady || timelines.length === 1);
  if (hasPeriod) clipped(gutter, 0, plotWidth(), height, drawPeriod);
  clipped(0, AXIS, width, height - AXIS, () => eachTrack(drawName));
  drawAxis(ticks);
  chart.dataset.drawn = drawn;
  chart.dataset.from = view.from;
  chart.dataset.to = view.to;
  chart.dataset.milliseconds = (performance.now() - began).toFixed(1);
  sayRange();
}

function clipped(x, y, w, h, paint) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  paint();
  context.restore();
}

function findTicks() {
  const rough = (view.to - view.from) / Math.max(2, plotWidth() / 96);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const [unit, scale] = data.plain ? ["", 1] : step * 10 >= 1 ? ["s", 1] : step * 10 >= 1e-3 ? ["ms", 1e3] : ["us", 1e6];
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  const ticks = [];
  for (let k = Math.ceil(view.from / step - 1e-9); k * step <= view.to; k++) {
    ticks.push({ x: toX(k * step), text: (k * step * scale).toFixed(digits) + (unit && " " + unit) });
  }
  return ticks;
}

function drawGrid(ticks) {
  context.fillStyle = theme.line;
  context.globalAlpha = 0.7;
  for (const tick of ticks) context.fillRect(Math.round(tick.x), AXIS, 1, height - AXIS);
  context.globalAlpha = 1;
  context.setLineDash([3, 3]);
  for (const number of view.shown) {
    const x = Math.round(toX(timelines[number].span)) - 0.5;
    if (x > gutter && timelines[number].span < fullSpan) line(x, AXIS, x, height, theme.faint);
  }
  context.setLineDash([]);
}

function line(x0, y0, x1, y1, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function drawAxis(ticks) {
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = theme.soft;
  for (const tick of ticks) {
    const half = context.measureText(tick.text).width / 2;
    if (tick.x + half > width) continue;
    context.textAlign = "center";
    if (tick.x - half >= gutter - 20) context.fillText(tick.text, Math.max(tick.x, gutter + half - 6), AXIS / 2);
  }
  line(gutter, AXIS - 0.5, width - 8, AXIS - 0.5, theme.line);
}

// Copies the drawing to the screen and adds what follows the pointer: a frame around the instruction, and the time.
function drawPointed() {
  screen.clearRect(0, 0, width, height);
  screen.drawImage(context.canvas, 0, 0, width, height);
  if (view.hover) eachTrack(drawFrame);
  if (view.pointer && view.pointer.x >= gutter && view.pointer.x <= width - 8) drawPointer(view.pointer.x);
}

function drawFrame(track) {
  const { rank, kind, index } = view.hover, { start, end, laneOf, ranks } = track.timeline;
  if (track.rank !== rank || track.kind !== kind || track.y < AXIS) return;
  const h = track.h / ranks[rank][kind].length, y = track.y + laneOf[index] * h;
  const left = Math.max(toX(start[index]), gutter), right = Math.min(toX(end[index]), width - 8);
  screen.strokeStyle = theme.ink;
  screen.lineWidth = h > 8 ? 2 : 1;
  if (right >= left) screen.strokeRect(left, y, Math.max(1, right - left - 1), h - 1);
}

function drawPointer(x) {
  screen.font = "12px system-ui, sans-serif";
  const text = formatTime(toTime(x)), half = screen.measureText(text).width / 2 + 5;
  const middle = Math.min(Math.max(x, gutter + half), width - half);
  screen.fillStyle = theme.ink;
  screen.globalAlpha = 0.5;
  screen.fillRect(Math.round(x), AXIS, 1, height - AXIS);
  screen.globalAlpha = 1;
  screen.fillRect(middle - half, 4, half * 2, AXIS - 9);
  screen.fillStyle = theme.panel;
  screen.textAlign = "center";
  screen.textBaseline = "middle";
  screen.fillText(text, middle, AXIS / 2);
}

function drawName(track) {
  const isNarrow = gutter < 100;
  if (track.kind === "memory") {
    const peak = formatBytes(track.timeline.ranks[track.rank].memory.peak);
    write(isNarrow ? peak : "peak " + peak, track.y + MEMORY / 2, "11px", theme.soft);
  }
  if (data.devices[track.rank].link) {
    write(data.devices[track.rank].name, track.y + COMMUNICATION / 2, "11px", theme.ink);
  }
  if (track.kind !== "compute") return;
  const busy = percent(track.timeline.busy[track.rank]) + " busy", { title } = track.timeline;
  if (track.position === 0 && track.rank > 0) {
    const y = Math.round(track.y - ROW_GAP / 2) - 0.5;
    line(0, y, width - 8, y, theme.line);
  }
  if (track.position === 0) write(titleOf(track.rank), track.y + 9, "600 13px", theme.ink);
  const text = view.shown.length === 1 ? busy : isNarrow ? title : title + ", " + busy;
  write(text, track.y + (track.position === 0 ? 25 : 10), "11px", theme.soft);
}

// Of many devices those that do the same share a row.
function titleOf(rank) {
  const { name, count } = data.devices[rank];
  return count > 1 ? name + " \u00d7 " + count : name;
}

function write(text, y, font, colour) {
  context.font = font + " system-ui, sans-serif";
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillStyle = colour;
  let shown = text;
  while (shown.length > 1 && context.measureText(shown).width > gutter - 10) {
    shown = shown.replace(/\u2026$/, "").slice(0, -1) + "\u2026";
  }
  context.fillText(shown, 0, y);
}

function drawTrack(track) {
  context.fillStyle = theme.track;
  const right = Math.min(toX(track.timeline.span), width - 8), left = Math.max(gutter, toX(0));
  if (right > left) context.fillRect(left, track.y, right - left, track.h);
  if (track.kind === "compute") tintPhases(track, left, right);
  if (track.kind === "memory") return drawMemory(track);
  const lanes = track.timeline.ranks[track.rank][track.kind];
  const laneHeight = track.h / Math.max(1, lanes.length);
  lanes.forEach((lane, index) => drawLane(lane, track, track.y + index * laneHeight, laneHeight));
}

// Of a schedule: what a device does before its first and after its last steady block lies on a tint.
function tintPhases(track, left, right) {
  const steady = track.timeline.steady?.[track.rank];
  if (!steady) return;
  const [from, to] = steady.map((time) => Math.min(Math.max(toX(time), left), Math.max(left, right)));
  context.fillStyle = theme["warm-up"];
  context.fillRect(left, track.y, from - left, track.h);
  context.fillStyle = theme["cool-down"];
  context.fillRect(to, track.y, Math.max(0, right - to), track.h);
}

// One period of the steady part, framed: from top to bottom, or where several timelines are shown, in the rows of the
// one that it was found in.
function drawPeriod() {
  const { factor } = timelines.find((timeline) => timeline.steady) || timelines[0];
  const left = toX(data.period.from * factor), right = toX(data.period.to * factor);
  context.fillStyle = theme.accent;
  context.fillRect(left, AXIS - 3, right - left, 3);
  if (view.shown.length === 1) framePeriod(left, right, AXIS, height);
  else {
    const blocks = new Map();
    eachTrack((track) => {
      if (track.timeline.steady) blocks.set(track.rank, [track.top, track.y + track.h]);
    });
    for (const [top, bottom] of blocks.values()) framePeriod(left, right, Math.max(AXIS, top), bottom);
  }
  chart.dataset.periodFrom = left;
  chart.dataset.periodTo = right;
}

function framePeriod(left, right, top, bottom) {
  context.fillStyle = theme.accent;
  context.globalAlpha = 0.1;
  context.fillRect(left, top, right - left, bottom - top);
  context.globalAlpha = 1;
  context.setLineDash([5, 3]);
  for (const x of [left, right]) line(Math.round(x) + 0.5, top, Math.round(x) + 0.5, bottom, theme.accent);
  context.setLineDash([]);
}

// Instructions narrower than a pixel and a half are gathered pixel by pixel: the longest gives the colour, and the
// share of the pixel that is covered gives the opacity.
function drawLane(lane, track, y, h) {
  const { start, end } = track.timeline;
  const gap = h > 6 ? 1 : 0;
  let pixel = -1, covered = 0, longest = -1;
  const flush = () => {
    if (longest >= 0) {
      context.globalAlpha = Math.min(1, Math.max(0.3, covered));
      fill(longest, pixel, y, 1, h - gap);
      context.globalAlpha = 1;
    }
    covered = 0;
    longest = -1;
  };
  for (let k = firstAbove(lane.latest, view.from); k < lane.items.length; k++) {
    const i = lane.items[k];
    if (start[i] > view.to) break;
    const x0 = Math.max(toX(start[i]), gutter - 2), x1 = Math.min(toX(end[i]), width + 2);
    if (x1 - x0 >= 1.5) {
      flush();
      const box = { x: x0, y, w: Math.max(1, x1 - x0 - (x1 - x0 > 4 ? 1 : 0)), h: h - gap };
      fill(i, box.x, box.y, box.w, box.h);
      writeInside(i, track, box);
      continue;
    }
    if (Math.floor(x0) !== pixel) flush();
    pixel = Math.floor(x0);
    covered += x1 - x0;
    if (longest < 0 || end[i] - start[i] > end[longest] - start[longest]) longest = i;
  }
  flush();
}

function fill(i, x, y, w, h) {
  const what = data.what[data.program.what[i]];
  context.fillStyle = "part" in what ? partColour(what) : colourOf(data.program.microbatch[i], shadeOf(what));
  context.fillRect(x, y, w, h);
  if (what.joint && w > 2) {
    context.strokeStyle = theme.ink;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
  }
  drawn++;
}

function writeInside(i, track, box) {
  if (track.kind !== "compute" || box.w < 13 || box.h < 13) return;
  const what = data.what[data.program.what[i]], microbatch = data.program.microbatch[i];
  const long = microbatch < 0 ? what.label : what.label + " \u00b7 " + microbatch;
  context.font = "600 11px system-ui, sans-serif";
  const left = Math.max(box.x, gutter), room = Math.min(box.x + box.w, width - 8) - left - 4;
  const isLong = microbatch < 0 || (box.w >= 110 && context.measureText(long).width <= room);
  const text = isLong ? long : String(microbatch);
  if (context.measureText(text).width > room) return;
  const isPale = "part" in what ? !what.strong : shadeOf(what) === "forward" && microbatch >= 0;
  context.fillStyle = isPale ? "#16202a" : "#ffffff";
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, left + (room + 4) / 2, box.y + box.h / 2 + 0.5);
}

// The highest value within each pixel is kept, so that no peak is lost when many points share one.
function drawMemory(track) {
  const { at, bytes } = track.timeline.ranks[track.rank].memory;
  const top = memoryTop(track), toY = (value) => track.y + track.h * (1 - Math.max(0, value) / top);
  const bottom = track.y + track.h;
  let k = Math.max(0, firstAbove(at, view.from) - 1);
  let last = k < at.length && at[k] <= view.from ? bytes[k] : 0;
  const right = Math.min(toX(track.timeline.span), width - 8);
  context.beginPath();
  context.moveTo(gutter, toY(last));
  for (; k < at.length && at[k] <= view.to; k++) {
    const x = Math.floor(toX(at[k]));
    let highest = bytes[k];
    const before = last;
    last = bytes[k];
    while (k + 1 < at.length && Math.floor(toX(at[k + 1])) === x) {
      k++;
      highest = Math.max(highest, bytes[k]);
      last = bytes[k];
    }
    context.lineTo(x, toY(before));
    context.lineTo(x, toY(highest));
    context.lineTo(x, toY(last));
  }
  context.lineTo(right, toY(last));
  context.strokeStyle = theme.activations;
  context.lineWidth = 1.25;
  context.stroke();
  context.lineTo(right, bottom);
  context.lineTo(gutter, bottom);
  context.globalAlpha = 0.35;
  context.fillStyle = theme.activations;
  context.fill();
  context.globalAlpha = 1;
  drawCapacity(track, top, toY);
}

function memoryTop(track) {
  const { peak } = track.timeline.ranks[track.rank].memory, { capacity } = data.devices[track.rank];
  return 1.08 * (capacity && capacity <= 5 * peak ? Math.max(capacity, peak) : peak || 1);
}

function drawCapacity(track, top, toY) {
  const { capacity } = data.devices[track.rank];
  if (!capacity || capacity > top) return;
  const y = Math.round(toY(capacity)) + 0.5;
  context.setLineDash([5, 3]);
  line(gutter, y, Math.min(toX(track.timeline.span), width - 8), y, theme.warn);
  context.setLineDash([]);
}
