// The visitor's API key, where the server wants one: asked for, kept in this tab, sent with every request.
const $ = (id) => document.getElementById(id);
const KEPT_AS = "legato-api-key";
let key = kept();
let waiting = []; // requests that the server refused for want of a key, as functions that send them again

// A browser that blocks all site data also refuses this; the key is then asked for at each load.
function kept() {
  try { return sessionStorage.getItem(KEPT_AS) ?? ""; } catch { return ""; }
}

function keep() {
  try { sessionStorage.setItem(KEPT_AS, key); } catch { /* as above */ }
}

function send(path, options, withKey) {
  if (!withKey) return fetch(path, options);
  // A header holds bytes: those of UTF-8, which the server compares.
  const bytes = String.fromCharCode(...new TextEncoder().encode(withKey));
  return fetch(path, { ...options, headers: { ...options.headers, authorization: `Bearer ${bytes}` } });
}

// As fetch. What needs a key waits until the visitor has given one that the server knows.
export async function request(path, options = {}) {
  for (;;) {
    const sent = key;
    const answer = await send(path, options, sent);
    if (answer.status !== 401) return answer;
    if (sent === key) await another();
  }
}

function another() {
  if (!waiting.length) {
    show(true);
    $("state").textContent = "needs a key";
    $("state").className = "pill bad";
    $("trouble").textContent = "";
    if (key) problem("The server no longer accepts this tab's key.");
  }
  return new Promise((resolve) => waiting.push(resolve));
}

function show(isAsked) {
  $("key").hidden = !isAsked;
  $("forget").hidden = isAsked || !key;
  document.querySelector("main").inert = isAsked; // nothing in it works without a key
  problem("");
  if (isAsked) $("key-input").focus();
}

function problem(text) {
  $("key-problem").textContent = text;
  $("key-input").ariaInvalid = text ? "true" : "false";
}

$("key").onsubmit = async (event) => {
  event.preventDefault();
  const given = $("key-input").value.trim();
  problem("");
  $("key-send").disabled = true;
  try {
    const answer = await send(`console/status${location.search}`, {}, given);
    if (answer.status === 401) {
      problem("The server does not know this key.");
      $("key-input").select();
      return;
    }
  } catch {
    problem("The server does not answer.");
    return;
  } finally {
    $("key-send").disabled = false;
  }
  key = given;
  keep();
  $("key-input").value = "";
  show(false);
  for (const resume of waiting.splice(0)) resume();
};

// What was read with the key, and what still runs with it, goes with the page.
$("forget").onclick = () => {
  try { sessionStorage.removeItem(KEPT_AS); } catch { /* nothing was kept */ }
  location.reload();
};
$("forget").hidden = !key;
