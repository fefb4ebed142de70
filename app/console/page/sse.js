// POST a streamed request and yield its parsed events, each with the time at which it arrived.
export async function* stream(path, body, signal) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => null);
    throw new Error(problem?.error?.message ?? `HTTP ${answer.status}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const at = performance.now();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: {")) continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield { data, at };
    }
  }
}
