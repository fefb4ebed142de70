// The engines of a fleet, and what became of streams whose engine died or left.
function cell(text, className = "") {
  const span = document.createElement("span");
  span.textContent = text;
  span.className = className;
  return span;
}

const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function row(engine) {
  const box = document.createElement("div");
  box.className = "engine";
  const used = engine.num_blocks ? 1 - engine.num_free_blocks / engine.num_blocks : 0;
  const role = ["prefill", "decode"].includes(engine.role) ? `, ${engine.role}` : "";
  const slack = engine.least_slack_s == null ? "–" : `${(1000 * engine.least_slack_s).toFixed(0)} ms`;
  const name = cell(engine.id);
  name.title = engine.id; // where there is no room for all of it
  box.append(
    name,
    cell(`${engine.state ?? "–"}${role}`, `pill ${engine.state === "serving" ? "good" : "bad"}`),
    cell(`${engine.num_running ?? 0} running`),
    cell(`${engine.num_waiting ?? 0} waiting`),
    cell(`KV ${(100 * used).toFixed(0)} %`),
    cell(`slack ${slack}`),
    cell(`budget ${engine.step_budget || "–"}`),
  );
  return box;
}

export function showFleet(place, status) {
  const { engines, fleet } = status;
  place.hidden = !engines;
  if (!engines) return;
  const latest = fleet.latest_moves.at(-1);
  const last = latest ? `, the last from ${latest.from} to ${latest.to} at token ${latest.num_tokens}` : "";
  const moves = `${counted(fleet.num_engines_lost, "engine")} lost, ${counted(fleet.num_moves, "stream")} moved${last}`;
  place.replaceChildren(...engines.map(row), cell(moves, "dim"));
}
