// The timeline of a Weft report: hover, zoom, choices and the table. report_draw.js comes before it in the same block.

// ---- hover

function trackAt(x, y) {
  let found = null;
  if (x >= gutter && x <= width - 8 && y >= AXIS) {
    eachTrack((track) => { if (y >= track.y && y < track.y + track.h) found = track; });
  }
  return found;
}

function instructionAt(track, x, y) {
  const lanes = track.timeline.ranks[track.rank][track.kind];
  if (lanes.length === 0) return -1;
  const lane = lanes[Math.min(lanes.length - 1, Math.floor((y - track.y) / (track.h / lanes.length)))];
  const { start, end } = track.timeline, time = toTime(x), reach = toTime(x + 3) - time;
  let best = -1, bestDistance = Infinity;
  for (let k = firstAbove(lane.latest, time - reach); k < lane.items.length; k++) {
    const i = lane.items[k];
    if (start[i] > time + reach) break;
    const distance = Math.max(0, start[i] - time, time - end[i]);
    if (distance < bestDistance) [best, bestDistance] = [i, distance];
  }
  return best;
}

function hover(clientX, clientY) {
  const box = canvas.getBoundingClientRect();
  view.pointer = { x: clientX - box.left, y: clientY - box.top };
  const track = trackAt(view.pointer.x, view.pointer.y);
  const index = track && track.kind !== "memory" ? instructionAt(track, view.pointer.x, view.pointer.y) : -1;
  view.hover = index >= 0 ? { index, rank: track.rank, kind: track.kind } : null;
  if (index >= 0) showTip(instructionFacts(track, index), clientX, clientY);
  else if (track && track.kind === "memory") showTip(memoryFacts(track, toTime(view.pointer.x)), clientX, clientY);
  else tip.hidden = true;
  requestFrame();
}

function instructionFacts(track, i) {
  const what = data.what[data.program.what[i]], microbatch = data.program.microbatch[i];
  const { factor } = track.timeline, from = track.timeline.start[i] / factor, to = track.timeline.end[i] / factor;
  const row = data.devices[track.rank];
  const facts = [[row.link ? "Link" : row.alike ? "Devices" : "Device", row.alike || row.name]];
  if (microbatch >= 0) facts.push(["Micro-batch", String(microbatch)]);
  facts.push(["Start", formatTime(from)], ["End", formatTime(to)], ["Duration", formatTime(to - from)]);
  if (data.program.part) facts.push(["Phase", data.parts[data.program.part[i]]]);
  if (data.program.after) facts.push(["Waited for", waitText(i)]);
  if (what.strong) facts.push(["Critical path", "yes"]);
  if (what.where) facts.push([what.joint ? "Devices" : "Link", what.where]);
  if (what.bytes !== null) facts.push(["Bytes", formatBytes(what.bytes)]);
  timelines.forEach((other, number) => {
    if (number === track.number) return;
    facts.push([capital(other.title), compare(to - from, (other.end[i] - other.start[i]) / other.factor)]);
  });
  const title = microbatch < 0 ? what.label : what.label + " mb " + microbatch;
  return { title: timelines.length > 1 ? title + " (" + track.timeline.title + ")" : title, facts };
}

// Of a placement: what ended last of all that the operator or transfer had to wait for.
function waitText(i) {
  const before = data.program.after[i], why = data.whys[data.program.why[i]];
  return before < 0 ? why : why + ": " + data.what[data.program.what[before]].label;
}

function compare(own, other) {
  const sign = other >= own ? "+" : "\u2212";
  return formatTime(other) + (own > 0 ? ` (${sign}${percent(Math.abs(other / own - 1))})` : "");
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function memoryFacts(track, time) {
  const { at, bytes, peak } = track.timeline.ranks[track.rank].memory, { name, capacity } = data.devices[track.rank];
  const k = firstAbove(at, time) - 1;
  const facts = [["Time", formatTime(time / track.timeline.factor)], ["Held", formatBytes(k >= 0 ? bytes[k] : 0)],
                 ["Peak", formatBytes(peak)]];
  if (capacity) facts.push(["Capacity", formatBytes(capacity)], ["Peak of capacity", percent(peak / capacity)]);
  return { title: "Memory of " + (data.devices[track.rank].alike || name), facts };
}

function element(name, text, parent) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function showTip({ title, facts }, x, y) {
  tip.replaceChildren();
  element("strong", title, tip);
  const list = element("dl", null, tip);
  for (const [name, value] of facts) {
    element("dt", name, list);
    element("dd", value, list);
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth - 8 ? x - box.width - 16 : x + 16;
  const top = y + 18 + box.height > innerHeight - 8 ? y - box.height - 12 : y + 18;
  tip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
}

function endHover() {
  view.pointer = view.hover = null;
  tip.hidden = true;
  requestFrame();
}

// ---- zoom and pan

function show(from, to) {
  const span = Math.min(fullSpan * 1.02, Math.max(to - from, fullSpan * 1e-6));
  const start = Math.min(Math.max(from, -fullSpan * 0.01), fullSpan * 1.01 - span);
  view.from = span >= fullSpan ? 0 : start;
  view.to = span >= fullSpan ? fullSpan : start + span;
  requestDraw();
}

function zoom(factor, at = (view.from + view.to) / 2) {
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

const pan = (fraction) => {
  const shift = fraction * (view.to - view.from);
  const limited = Math.min(Math.max(shift, -view.from), fullSpan - view.to);
  show(view.from + limited, view.to + limited);
};
const isWhole = () => view.to - view.from >= fullSpan * 0.9999;

let pageScrolled = -1000;
addEventListener("scroll", () => { pageScrolled = performance.now(); }, { passive: true });

// A wheel that is scrolling the page goes on doing so when the chart slides under the pointer.
canvas.addEventListener("wheel", (event) => {
  const x = event.clientX - canvas.getBoundingClientRect().left;
  if (x < gutter || performance.now() - pageScrolled < 250) return;
  const across = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
  if (isWhole() && (across || event.deltaY > 0)) return;
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 16 : 1, amount = (across ? event.deltaX || event.deltaY : event.deltaY) * lines;
  if (across) pan(amount / plotWidth());
  else zoom(Math.exp(Math.max(-120, Math.min(120, amount)) * 0.0025), toTime(x));
}, { passive: false });

const fingers = new Map();
canvas.addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  canvas.setPointerCapture(event.pointerId);
  canvas.classList.add("dragging");
});
canvas.addEventListener("pointermove", (event) => {
  const before = fingers.get(event.pointerId);
  if (before === undefined) return hover(event.clientX, event.clientY);
  const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
  if (others.length === 1) pinch(others[0], before, event);
  else {
    pan((before.x - event.clientX) / plotWidth());
    if (event.pointerType === "mouse") chart.scrollTop += before.y - event.clientY;
  }
  fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  hover(event.clientX, event.clientY);
});
function pinch(still, before, now) {
  const old = Math.abs(still.x - before.x), current = Math.abs(still.x - now.clientX);
  if (old > 4 && current > 4) zoom(old / current, toTime(still.x - canvas.getBoundingClientRect().left));
}
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, (event) => {
    fingers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (event.pointerType !== "mouse" && name === "pointerup") hover(event.clientX, event.clientY);
  });
}
canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") endHover(); });
canvas.addEventListener("dblclick", () => show(0, fullSpan));
chart.addEventListener("scroll", () => { if (view.pointer) tip.hidden = true; requestDraw(); });
chart.addEventListener("blur", () => { if (!view.pointer) endHover(); });

// ---- from instruction to instruction by keys

let picked = null;

// Shows the next compute instruction (or the one before) of the picked device, the same as pointing at it would.
function step(direction) {
  const track = pickedTrack();
  if (track === null) return;
  const { start, end, ranks } = track.timeline, items = ranks[track.rank].compute.flatMap((lane) => lane.items);
  if (items.length === 0) return;
  items.sort((a, b) => start[a] - start[b] || a - b);
  const place = picked.index < 0 ? (direction > 0 ? -1 : items.length) : items.indexOf(picked.index);
  picked.index = items[Math.min(Math.max(place + direction, 0), items.length - 1)];
  const span = view.to - view.from;
  if (start[picked.index] < view.from || end[picked.index] > view.to) {
    show((start[picked.index] + end[picked.index] - span) / 2, (start[picked.index] + end[picked.index] + span) / 2);
  }
  showPicked();
}

// Picks the device below or above.
function stepRow(direction) {
  const rows = data.devices.map((_, rank) => rank).filter((rank) => !data.devices[rank].link);
  const place = picked ? rows.indexOf(picked.rank) + direction : 0;
  picked = { rank: rows[Math.min(Math.max(place, 0), rows.length - 1)], index: -1 };
  const top = rowTop[picked.rank], bottom = rowTop[picked.rank + 1];
  if (top - AXIS < chart.scrollTop) chart.scrollTop = top - AXIS;
  if (bottom > chart.scrollTop + height) chart.scrollTop = bottom - height;
  step(1);
}

function pickedTrack() {
  if (picked === null) picked = { rank: Math.max(0, data.devices.findIndex((device) => !device.link)), index: -1 };
  let found = null;
  eachTrack((track) => {
    if (found === null && track.rank === picked.rank && track.kind === "compute") found = track;
  });
  return found;
}

function showPicked() {
  const track = pickedTrack();
  if (track === null) return;
  const { start, end } = track.timeline, box = canvas.getBoundingClientRect();
  view.hover = { index: picked.index, rank: picked.rank, kind: "compute" };
  const x = Math.min(Math.max(toX((start[picked.index] + end[picked.index]) / 2), gutter), width);
  showTip(instructionFacts(track, picked.index), box.left + x, box.top + track.y + track.h);
  requestFrame();
}

const KEYS = {
  n: () => step(1), p: () => step(-1), ArrowDown: () => stepRow(1), ArrowUp: () => stepRow(-1),
  "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "_": () => zoom(1 / 0.7),
  "0": () => show(0, fullSpan), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  Home: () => pan(-1e9), End: () => pan(1e9), Escape: endHover,
};
chart.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  if (action === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});
$("zoom-in").onclick = () => zoom(0.6);
$("zoom-out").onclick = () => zoom(1 / 0.6);
$("zoom-fit").onclick = () => show(0, fullSpan);

let rangeTimer = 0;
function sayRange() {
  clearTimeout(rangeTimer);
  rangeTimer = setTimeout(() => {
    $("range").textContent = isWhole() ? formatTime(fullSpan) + " in all"
      : `${formatTime(Math.max(0, view.from))} to ${formatTime(view.to)} of ${formatTime(fullSpan)}`;
  }, 120);
}

// ---- choices and legend

function setUpToggle(id, field) {
  $(id).onclick = () => {
    view[field] = !view[field];
    $(id).setAttribute("aria-pressed", String(view[field]));
    layOut();
  };
}

function setUpChoice() {
  if (timelines.length < 2) {
    $("stretch").parentElement.remove();
    return;
  }
  $("stretch").onclick = () => {
    const isStretched = $("stretch").getAttribute("aria-pressed") !== "true";
    $("stretch").setAttribute("aria-pressed", String(isStretched));
    stretchTimelines(isStretched);
    endHover();
    requestDraw();
  };
  const options = timelines.map((timeline, number) => [capital(timeline.title), [number]]);
  options.unshift([timelines.length === 2 ? "Both" : "All", timelines.map((_, number) => number)]);
  const buttons = options.map(([text, shown], position) => {
    const button = element("button", text, $("choice"));
    button.type = "button";
    button.onclick = () => {
      view.shown = shown;
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      layOut();
    };
    button.setAttribute("aria-pressed", String(position === 0));
    return button;
  });
  view.shown = options[0][1];
}

function drawLegend() {
  const legend = $("legend");
  legend.replaceChildren();
  const phases = new Set(data.what.map((what) => what.phase));
  const names = [["forward", "forward", phases.has("F")], ["backward", "backward", phases.has("B") || phases.has("I")],
                 ["weight", "weight gradients", phases.has("W")]];
  for (const [shade, text, isUsed] of names) if (isUsed) addStrip(legend, shade, text);
  if (data.what.some((what) => "part" in what)) {
    addParts(legend, true, "on the critical path");
    addParts(legend, false, "others, from the first to the last operator");
  }
  const ops = new Set(data.what.map((what) => what.op));
  const others = [["collective", "gradient exchange"], ["step", "optimizer"]].filter(([op]) => ops.has(op));
  if (others.length) addSwatch(legend, theme.neutral, others.map(([, text]) => text).join(", "));
  const hasCapacity = hasMemory && data.devices.some((device) => device.capacity);
  if (hasMemory) addSwatch(legend, theme.activations, "memory held");
  if (hasCapacity) addSwatch(legend, theme.warn, "memory capacity", "dash");
  if (data.what.some((what) => what.joint)) addSwatch(legend, theme.ink, "on several devices", "outline");
  if (timelines.some((timeline) => timeline.steady)) {
    for (const name of ["warm-up", "cool-down"]) addSwatch(legend, theme[name], name);
  }
  if (data.period) addSwatch(legend, theme.accent, data.period.text, "dash");
}

function addStrip(legend, shade, text) {
  const strip = element("span", null, legend);
  strip.className = "strip";
  for (let microbatch = 0; microbatch < Math.min(8, data.microbatches); microbatch++) {
    const swatch = element("i", String(microbatch), strip);
    swatch.style.background = colourOf(microbatch, shade);
    swatch.style.color = shade === "forward" ? "#16202a" : "#ffffff";
  }
  const range = data.microbatches > 8 ? `, micro-batches 0 to ${data.microbatches - 1}` : " of micro-batch";
  element("b", text + range, strip);
}

function addParts(legend, strong, text) {
  const strip = element("span", null, legend);
  strip.className = "strip";
  for (let step = 0; step < 6; step++) {
    element("i", null, strip).style.background = partColour({ part: step / 5, strong });
  }
  element("b", text, strip);
}

function addSwatch(legend, colour, text, shape = "box") {
  const item = element("span", null, legend), swatch = element("i", null, item);
  swatch.className = shape;
  swatch.style.color = colour;
  item.append(text);
}

// ---- the table alternative

const PAGE = 100;
let page = 0;

function setUpTable() {
  data.devices.forEach((_, rank) => { element("option", titleOf(rank), $("table-device")).value = rank; });
  timelines.forEach((timeline, number) => {
    element("option", capital(timeline.title), $("table-timeline")).value = number;
  });
  $("table-timeline-label").hidden = timelines.length < 2;
  for (const id of ["table-device", "table-timeline"]) $(id).onchange = () => { page = 0; fillTable(); };
  $("table-back").onclick = () => { page -= 1; fillTable(); };
  $("table-next").onclick = () => { page += 1; fillTable(); };
  $("instructions").ontoggle = () => { if ($("instructions").open) fillTable(); };
}

function fillTable() {
  const rank = Number($("table-device").value), { start, end, factor } = timelines[Number($("table-timeline").value)];
  const first = data.program.rank_start[rank], last = data.program.rank_start[rank + 1];
  const from = first + page * PAGE, to = Math.min(last, from + PAGE);
  const body = $("table-body");
  body.replaceChildren();
  for (let i = from; i < to; i++) {
    const what = data.what[data.program.what[i]], microbatch = data.program.microbatch[i];
    const row = element("tr", null, body);
    element("td", what.label, row);
    element("td", data.program.after ? waitText(i) : microbatch < 0 ? "" : String(microbatch), row);
    const times = [start[i], end[i], end[i] - start[i]].map((time) => formatTime(time / factor));
    for (const text of [...times, lastColumn(what, i)]) element("td", text, row).className = "n";
  }
  $("table-range").textContent = last > first ? `${from - first + 1} to ${to - first} of ${last - first}` : "none";
  $("table-back").disabled = page === 0;
  $("table-next").disabled = to >= last;
}

function lastColumn(what, i) {
  if (data.plain) return data.program.part ? data.parts[data.program.part[i]] : "";
  return what.bytes === null ? "" : formatBytes(what.bytes);
}

// ---- start

function restyle() {
  readTheme();
  drawLegend();
  requestDraw();
}

$("chart-panel").hidden = false;
if (data.left_out) $("left-out").textContent = data.left_out + " more devices are left out of the chart.";
readTheme();
setUpChoice();
setUpToggle("show-communication", "communication");
setUpToggle("show-memory", "memory");
if (timelines.every((timeline) => timeline.ranks.every((rank) => rank.communication.length === 0))) {
  $("show-communication").remove();
  view.communication = false;
}
if (!hasMemory) $("show-memory").remove();
setUpTable();
drawLegend();
layOut();
new ResizeObserver(layOut).observe(chart);
dark.addEventListener("change", restyle);
