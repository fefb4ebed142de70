// The console: wires the page's controls to the server's own public API and feed.
import { Chat } from "./chat.js";
import { bars, count, histogram, lines, rate, stepMs } from "./charts.js";
import { showFleet } from "./fleet.js";
import { request } from "./key.js";
import { follow, refusal } from "./sse.js";
import { Streams } from "./streams.js";

const $ = (id) => document.getElementById(id);
const WINDOW = 240; // iterations shown
const iterations = [];
const counts = []; // of streamed tokens
const tbt = [];
const ttft = [];
let status = {};
let answeredAt = null; // when the server last gave its status
let cameAt = 0; // the newest iterations; none come while the engine is idle

// Times are the server's: a browser that is busy, or far away, is late by itself.
const record = { first(ms) { ttft.push(ms); if (ttft.length > 2000) ttft.shift(); } };
const notice = (text) => { $("notice").textContent = text; };
const trouble = (text) => { if ($("trouble").textContent !== text) $("trouble").textContent = text; };
const model = () => status.model;
const chat = new Chat({ $, model, record });
const streams = new Streams({ $, model, record, notice, maxLength: () => status.max_model_len || 2048 });

function tile(label, value) {
  const box = document.createElement("div");
  box.className = "tile";
  const b = document.createElement("b");
  b.textContent = value;
  const span = document.createElement("span");
  span.textContent = label;
  box.append(b, span);
  return box;
}

function showCauses() {
  const { gaps_kept: kept, gaps_missed: missed } = status.objectives;
  const rows = Object.entries(missed).sort((a, b) => b[1] - a[1]);
  const total = rows.reduce((sum, [, count]) => sum + count, 0);
  $("kept-note").textContent = kept + total ? `${(Math.floor((1000 * kept) / (kept + total)) / 10).toFixed(1)} % kept` : "";
  $("causes").replaceChildren(...rows.map(([cause, count]) => {
    const row = document.createElement("div");
    row.className = "cause";
    const name = document.createElement("span");
    name.textContent = cause.replace("_", " ");
    const bar = document.createElement("i");
    bar.style.width = `${(100 * count) / rows[0][1]}%`;
    const number = document.createElement("span");
    number.textContent = count;
    row.append(name, bar, number);
    return row;
  }));
}

function showTiles() {
  const percent = (blocks = 0) => (status.num_blocks ? `${((100 * blocks) / status.num_blocks).toFixed(0)} %` : "–");
  $("held").hidden = !status.holds_starts;
  $("tiles").replaceChildren(
    tile("decoding", status.num_decoding ?? "–"),
    tile("prefilling", status.num_prefilling ?? "–"),
    tile("waiting", status.num_waiting ?? "–"),
    tile("KV in use", percent(status.num_blocks - status.num_free_blocks)),
    tile("KV cached", percent(status.num_cached_blocks)),
    tile("preemptions", status.num_preemptions ?? "–"),
    tile("recoveries", status.recoveries ?? "–"),
  );
}

// One of several models is watched at a time: another is another page.
function showModels() {
  if (status.models.length < 2) {
    $("model").textContent = $("model").title = status.model;
  } else if (!$("model").querySelector("select")) {
    const choice = document.createElement("select");
    choice.ariaLabel = "Model";
    for (const name of status.models) choice.add(new Option(name, name, false, name === status.model));
    choice.onchange = () => { location.search = `?${new URLSearchParams({ model: choice.value })}`; };
    $("model").replaceChildren(choice);
  }
}

function show(told) {
  $("state").textContent = told.ready ? "ready" : told.error ? "refused" : "not ready";
  $("state").className = `pill ${told.ready ? "good" : "bad"}`;
  trouble(told.ready ? "" : told.error?.message ?? `The server is not ready${told.reason ? `: ${told.reason}` : ""}.`);
  if (!told.error) status = told; // a refusal, as of a key beyond its limit, says nothing of the engine
  if (!told.ready) return;
  showModels();
  showTiles();
  showFleet($("fleet"), status);
  showCauses();
  $("budget").max = status.max_step_tokens;
  if (!$("policy").options.length)
    for (const name of status.policies) $("policy").add(new Option(name, name));
  if (document.activeElement !== $("policy")) $("policy").value = status.policy;
  if (document.activeElement !== $("budget")) $("budget").value = status.token_budget ?? "";
}

async function poll() {
  let told;
  try {
    const answer = await request(`console/status${location.search}`);
    told = await answer.json();
  } catch {
    $("state").textContent = "offline";
    $("state").className = "pill bad";
    const at = answeredAt?.toLocaleTimeString();
    trouble(at ? `The server has not answered since ${at}; the figures are from then.` : "The server does not answer.");
    return;
  }
  answeredAt = new Date();
  show(told);
}

async function keepPolling() {
  await poll().catch(console.error); // a fault of the page; without a key it waits for one
  setTimeout(keepPolling, 2000);
}

let numChanges = 0; // of settings that were tried: only the newest one's outcome is told

async function settings(changes) {
  const number = ++numChanges;
  notice("");
  let problem = "";
  try {
    const answer = await request(`console/settings${location.search}`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(changes),
    });
    if (!answer.ok) problem = await refusal(answer);
  } catch (error) {
    problem = `The server does not answer: ${error.message}`;
  }
  if (problem && number === numChanges) {
    notice(problem);
    $("policy").value = status.policy; // the switch shows what is in force
  }
  await poll();
}

// A change that is not even sent.
function refuse(text) {
  numChanges += 1;
  notice(text);
}

// A message of the feed.
function take({ iterations: fresh, gaps_s, num_tokens }) {
  iterations.push(...fresh);
  count(counts, fresh.at(-1).done_s, num_tokens);
  cameAt = performance.now();
  const gaps = gaps_s.map((s) => 1000 * s);
  tbt.push(...gaps);
  tbt.splice(0, Math.max(0, tbt.length - 8000));
  streams.served(fresh, gaps);
  iterations.splice(0, Math.max(0, iterations.length - WINDOW));
  if (status.engines) return; // one engine's counts are not the fleet's
  const last = iterations.at(-1);
  Object.assign(status, {
    num_decoding: last.num_decoding, num_prefilling: last.num_prefilling,
    num_waiting: last.num_waiting, num_free_blocks: last.num_free_blocks,
    num_preemptions: last.num_preemptions, holds_starts: last.holds_starts,
  });
  showTiles();
}

function draw() {
  const objective = status.tbt_s ? 1000 * status.tbt_s : null;
  bars($("tokens"), iterations.map((i) => [i.num_decode_tokens, i.num_prefill_tokens]), {
    colors: ["--decode", "--prefill"], slots: WINDOW, limits: iterations.map((i) => i.token_budget), lineColor: "--budget",
  });
  lines($("times"), [
    { color: "--decode", points: iterations.map(stepMs) },
    { color: "--budget", points: iterations.map((i) => (i.predicted_s ? 1000 * i.predicted_s : null)) },
  ], { slots: WINDOW, line: objective, lineColor: "--slo" });
  histogram($("tbt"), tbt, { line: objective, lineColor: "--slo", color: "--decode" });
  histogram($("ttft"), ttft, {
    line: status.ttft_s ? 1000 * status.ttft_s : null, lineColor: "--slo", color: "--prefill",
  });
  $("tbt-note").textContent = quantiles(tbt);
  $("ttft-note").textContent = quantiles(ttft);
  $("rate").textContent = rate(counts, (performance.now() - cameAt) / 1000);
  streams.draw(objective);
  requestAnimationFrame(() => setTimeout(draw, 100));
}

function quantiles(values) {
  if (!values.length) return "";
  const sorted = [...values].sort((a, b) => a - b);
  const at = (q) => sorted[Math.ceil(q * sorted.length) - 1].toFixed(0);
  return `P50 ${at(0.5)} ms, P99 ${at(0.99)} ms`;
}

$("theme").onclick = () => {
  const root = document.documentElement;
  const dark = root.classList.contains("dark") ||
    (!root.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
  root.classList.toggle("dark", !dark);
  root.classList.toggle("light", dark);
};
$("policy").onchange = () => settings({ policy: $("policy").value });
$("budget").onchange = () => {
  const budget = $("budget");
  if (budget.checkValidity()) settings({ token_budget: budget.value === "" ? null : Number(budget.value) });
  else refuse(`budget: ${budget.validationMessage}`);
};
$("streams").onclick = () => streams.toggle();
$("long").onclick = () => streams.sendLong();

await keepPolling();
follow(`console/feed${location.search}`, take, undefined, () => { // perhaps of another front, or after a time out of view
  iterations.length = 0;
  counts.length = 0;
  streams.offset = Infinity;
});
draw();
chat.focus();
