// Three small charts on canvas; colors come from the page's custom properties.
const PAD = { left: 34, right: 6, top: 8, bottom: 4 };
const LABELS = 14; // height of a line of labels below

function begin(canvas, top, bottom = PAD.bottom) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  // Setting the size also clears the canvas. The attribute stays the height in CSS pixels.
  canvas.dataset.height ??= canvas.getAttribute("height");
  const rows = Number(canvas.dataset.height);
  canvas.style.height = `${rows}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(rows * ratio);
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  const area = { x: PAD.left, y: PAD.top, w: width - PAD.left - PAD.right, h: rows - PAD.top - bottom };
  g.font = "11px system-ui, sans-serif";
  g.fillStyle = color("--dim");
  g.textAlign = "right";
  g.fillText(label(top), PAD.left - 5, PAD.top + 8);
  g.fillText("0", PAD.left - 5, rows - bottom);
  return { g, area, y: (v) => area.y + area.h * (1 - Math.min(1, v / top)) };
}

// Colors are light-dark() functions: only a real element knows which side is in force.
const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);
export function color(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const label = (v) =>
  v >= 1000 ? `${(v / 1000).toFixed(1)}k` : v >= 10 || Number.isInteger(v) ? v.toFixed(0) : v.toFixed(1);

function rule(g, area, y, color) {
  g.strokeStyle = color;
  g.setLineDash([4, 3]);
  g.beginPath();
  g.moveTo(area.x, y);
  g.lineTo(area.x + area.w, y);
  g.stroke();
  g.setLineDash([]);
}

// limits: of each row, drawn as a line above it. A few far above the others, as of steps of an idle engine, do not set
// the scale: all else would be flat.
export function bars(canvas, rows, { colors, slots, limits, lineColor }) {
  const sums = rows.map((row) => row.reduce((a, b) => a + b, 0));
  const usual = [...limits].sort((a, b) => a - b)[Math.ceil(0.9 * limits.length) - 1] ?? 0;
  const top = Math.ceil(Math.max(8, usual * 1.1, ...sums));
  const { g, area, y } = begin(canvas, top);
  const w = area.w / slots;
  const fills = colors.map(color); // each costs a style of the page: not once a bar
  rows.forEach((row, n) => {
    let sum = 0;
    row.forEach((value, k) => {
      g.fillStyle = fills[k];
      g.fillRect(area.x + (slots - rows.length + n) * w, y(sum + value), Math.max(1, w - 0.4), y(sum) - y(sum + value));
      sum += value;
    });
  });
  g.fillStyle = color(lineColor);
  limits.forEach((limit, n) => {
    if (limit && limit <= top) g.fillRect(area.x + (slots - limits.length + n) * w, y(limit), w, 1.5);
  });
}

export function lines(canvas, series, { slots, line, lineColor }) {
  const all = series.flatMap((s) => s.points.filter((p) => p !== null));
  const top = Math.max(1, (line ?? 0) * 1.15, ...all);
  const { g, area, y } = begin(canvas, top);
  for (const { color: name, points } of series) {
    g.strokeStyle = color(name);
    g.beginPath();
    let down = false;
    points.forEach((point, n) => {
      const x = area.x + ((slots - points.length + n) / slots) * area.w;
      if (point === null) down = false;
      else if (down) g.lineTo(x, y(point));
      else { g.moveTo(x, y(point)); down = true; }
    });
    g.stroke();
  }
  if (line) rule(g, area, y(line), color(lineColor));
}

export function histogram(canvas, values, { line, lineColor, color: name }) {
  // Logarithmic bins: a stall is ten or a hundred times a token's usual gap.
  const low = 1, high = 20000, bins = 48;
  const counts = new Array(bins).fill(0);
  const at = (v) => Math.min(bins - 1, Math.max(0, Math.floor((bins * Math.log(v / low)) / Math.log(high / low))));
  for (const v of values) counts[at(Math.max(low, v))] += 1;
  const top = Math.max(1, ...counts);
  const { g, area, y } = begin(canvas, top, LABELS);
  const w = area.w / bins;
  g.fillStyle = color(name);
  counts.forEach((count, n) => {
    if (count) g.fillRect(area.x + n * w, Math.min(y(count), area.y + area.h - 2), w - 1, Math.max(2, area.y + area.h - y(count)));
  });
  g.fillStyle = color("--dim");
  g.textAlign = "center";
  for (const ms of [10, 100, 1000, 10000]) {
    const x = area.x + (at(ms) + 0.5) * w;
    g.fillText(ms >= 1000 ? `${ms / 1000} s` : `${ms} ms`, x, area.y + area.h + LABELS - 3);
  }
  if (line) {
    g.fillStyle = color(lineColor);
    g.fillRect(area.x + (at(line) + 1) * w, area.y, 1.5, area.h);
  }
}

const RATE_S = 5;
// Streamed tokens a second, of the last seconds. counts: [when in s, tokens since the server's start], oldest first;
// idle_s: since the newest came. What steps compute is no measure: it includes drafts that are rejected.
export function rate(counts, idle_s) {
  if (counts.length < 2) return "";
  const [last_s, streamed] = counts.at(-1), now_s = last_s + idle_s;
  const [begin_s, before] = counts.findLast(([at_s]) => at_s <= now_s - RATE_S) ?? counts[0];
  const span_s = Math.min(RATE_S, now_s - begin_s);
  return span_s > 0 ? `${((streamed - before) / span_s).toFixed(0)} tokens/s` : "";
}

// Add a count and forget those that no rate needs; a server that began anew, or another one, counts from elsewhere.
export function count(counts, at_s, streamed) {
  const last = counts.at(-1);
  if (last && (streamed < last[1] || at_s < last[0] - RATE_S)) counts.length = 0;
  counts.push([at_s, streamed]);
  while (counts.length > 2 && counts[1][0] <= at_s - RATE_S) counts.shift();
}

// Of its slowest stage, which is what is predicted: between its stages it waits for other steps.
export const stepMs = ({ stages_s }) => 1000 * Math.max(0, ...stages_s.map(([begin_s, end_s]) => end_s - begin_s));
