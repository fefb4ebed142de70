// The engines of a fleet, and what became of streams whose engine died or left.
function cell(text, className = "") {
  const span = document.createElement("span");
  span.textContent = text;
  span.className = className;
  return span;
}

function row(engine) {
  const box = document.createElement("div");
  box.className = "engine";
  const used = engine.num_blocks ? 1 - engine.num_free_blocks / engine.num_blocks : 0;
  const role = ["prefill", "decode"].includes(engine.role) ? `, ${engine.role}` : "";
  const slack = engine.least_slack_s == null ? "–" : `${(1000 * engine.least_slack_s).toFixed(0)} ms`;
  box.append(
    cell(engine.id),
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
  const moves = `${fleet.num_engines_lost} engines lost, ${fleet.num_moves} streams moved${last}`;
  place.replaceChildren(...engines.map(row), cell(moves, "dim"));
}
