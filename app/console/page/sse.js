// Streams of server-sent events, which EventSource would read without the visitor's key.
import { request } from "./key.js";

// The parsed events of an answer, each with the time at which it arrived.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const at = performance.now();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: {")) yield { data: JSON.parse(part.slice(6)), at };
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection, if it is still open
  }
}

// Why an answer is none: a proxy's, unlike the server's own, has no message that can be read.
export async function refusal(answer) {
  const problem = await answer.json().catch(() => null);
  return problem?.error?.message ?? `HTTP ${answer.status}`;
}

// POST a streamed request and yield its events.
export async function* stream(path, body, signal) {
  let answer = null;
  try {
    answer = await request(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    });
    if (!answer.ok) throw new Error(await refusal(answer));
    for await (const event of events(answer)) {
      if (event.data.error) throw new Error(event.data.error.message);
      yield event;
    }
  } catch (problem) {
    if (!(problem instanceof TypeError)) throw problem;
    // Of a network that fails, browsers say little.
    throw new Error(`${answer ? "The answer broke off" : "The server does not answer"}: ${problem.message}`);
  }
}

const AGAIN_MS = 3000; // as browsers wait before an EventSource connects again

// Once the page is in view, or out of it.
function seen(isSeen, signal) {
  return new Promise((resolve) => {
    const look = () => { if (document.hidden !== isSeen) resolve(); };
    document.addEventListener("visibilitychange", look, { signal });
    look();
  });
}

// GET a feed and hand its messages on. One that breaks off is opened again, also while the server restarts or has too
// much to do; one that it refuses is not. A tab out of view has none: a browser gives all tabs six connections to a
// server, and a seventh tab would wait for one forever.
export async function follow(path, take, again_ms = AGAIN_MS, opened = () => {}) {
  for (;;) {
    const left = new AbortController(), ended = new AbortController();
    await seen(true, ended.signal);
    seen(false, ended.signal).then(() => left.abort());
    try {
      const headers = { accept: "text/event-stream" };
      const answer = await request(path, { headers, cache: "no-store", signal: left.signal });
      if (answer.status >= 400 && answer.status < 500 && answer.status !== 429) return;
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      opened();
      for await (const { data } of events(answer)) take(data);
    } catch (problem) {
      if (!left.signal.aborted) console.warn(problem);
    } finally {
      ended.abort();
    }
    if (!left.signal.aborted) await new Promise((resolve) => setTimeout(resolve, again_ms));
  }
}
