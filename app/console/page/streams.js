// Background streams whose pace one can see, and the long prompt that tests it.
import { color } from "./charts.js";
import { stream } from "./sse.js";

const NUM_STREAMS = 8;
const SHOWN_MS = 8000; // of each lane
const TOKENS = 1000; // per stream before it starts over: more would fill the KV blocks of a small server

// A tab out of view draws nothing, but its streams go on: what is too old to be shown goes when something comes.
function note(times, at) {
  while (times.length && times[0] < at - SHOWN_MS) times.shift();
  times.push(at);
}

export class Streams {
  constructor({ $, model, record, notice, maxLength }) {
    Object.assign(this, { $, model, record, notice, maxLength, lanes: [], abort: null, marks: [] });
    this.server = this.lane("server");
    this.server.row.classList.add("server");
    this.offset = Infinity; // of the server's clock to the browser's, in ms
    this.forget();
  }

  // Longest gap between tokens: as the server sent them, to other clients too, and as they came here.
  forget() { this.worst = this.worstHere = 0; }

  // What the server did: records of its iterations, and the gaps of its streams in ms.
  served(iterations, gaps) {
    const now = performance.now();
    // The feed is late by some tenths of a second at most; the least late message tells the clocks.
    this.offset = Math.min(this.offset, now - 1000 * iterations.at(-1).done_s);
    if (!this.abort) return;
    for (const { done_s, num_decode_tokens } of iterations)
      if (num_decode_tokens) note(this.server.times, 1000 * done_s + this.offset);
    this.worst = Math.max(this.worst, ...gaps);
  }

  toggle() {
    if (this.abort) {
      this.abort.abort();
      this.abort = null;
      this.$("streams").textContent = `Start ${NUM_STREAMS} streams`;
      return;
    }
    this.abort = new AbortController();
    this.forget();
    this.$("streams").textContent = "Stop the streams";
    this.server.times.length = 0;
    this.lanes = Array.from({ length: NUM_STREAMS }, (_, n) => this.lane(`stream ${n + 1}`));
    this.$("lanes").replaceChildren(this.server.row, ...this.lanes.map((lane) => lane.row));
    this.run(this.abort.signal);
  }

  lane(title) {
    const row = document.createElement("div");
    row.className = "lane";
    const name = document.createElement("span");
    name.textContent = title;
    const canvas = document.createElement("canvas");
    canvas.height = 12;
    const gap = document.createElement("span");
    row.append(name, canvas, gap);
    // state: "" while tokens come, else what the stream waits for. rests: [from, to) without any.
    return { row, canvas, gap, times: [], state: "", rests: [] };
  }

  // A stream that waits for its next request, or in it for its first token, is not stalled.
  rest(lane, state) {
    if (!lane.state) lane.rests.push({ begin: performance.now(), end: null });
    lane.state = state;
  }

  resume(lane, at) {
    if (lane.state) lane.rests.at(-1).end = at;
    lane.state = "";
  }

  // One request of eight continuations: browsers allow six connections to a server.
  async run(signal) {
    while (!signal.aborted) {
      const last = new Array(NUM_STREAMS).fill(null);
      for (const lane of this.lanes) this.rest(lane, "waiting");
      try {
        const body = {
          model: this.model(), prompt: Array.from({ length: 24 }, () => 300 + Math.floor(Math.random() * 3000)),
          n: NUM_STREAMS, max_tokens: Math.min(TOKENS, this.maxLength() - 32), ignore_eos: true, temperature: 0.8,
          stream_options: { include_timing: true },
        };
        for await (const { data, at } of stream("v1/completions", body, signal)) {
          if (data.timing) this.record.first(data.timing.ttft_ms);
          for (const { index, finish_reason } of data.choices) {
            const lane = this.lanes[index];
            if (last[index] !== null) this.worstHere = Math.max(this.worstHere, at - last[index]);
            last[index] = at;
            this.resume(lane, at);
            note(lane.times, at);
            if (finish_reason) this.rest(lane, "done");
          }
        }
      } catch (problem) {
        if (problem.name === "AbortError") return;
        this.notice(problem.message);
        if (!signal.aborted) this.toggle();
        return;
      }
    }
  }

  async sendLong() {
    const length = Math.min(3000, Math.floor(0.75 * this.maxLength()));
    this.forget();
    const begin = performance.now();
    const mark = { begin, end: null };
    this.marks.push(mark);
    this.notice("");
    try {
      const body = {
        model: this.model(), max_tokens: 4, ignore_eos: true, stream_options: { include_timing: true },
        prompt: Array.from({ length }, () => 300 + Math.floor(Math.random() * 3000)),
      };
      for await (const { data, at } of stream("v1/completions", body)) {
        mark.end ??= at;
        if (data.timing) this.record.first(data.timing.ttft_ms);
      }
    } catch (problem) {
      this.notice(problem.message);
    }
    mark.end ??= performance.now();
  }

  draw(objective) {
    const now = performance.now();
    this.marks = this.marks.filter(({ end }) => end === null || end >= now - SHOWN_MS);
    const [line, dim, decode] = ["--line", "--dim", "--decode"].map(color);
    for (const lane of this.lanes.length ? [this.server, ...this.lanes] : []) {
      const { canvas, times, rests } = lane;
      while (times.length && times[0] < now - SHOWN_MS) times.shift();
      while (rests.length && rests[0].end && rests[0].end < now - SHOWN_MS) rests.shift();
      const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
      canvas.width = Math.round(width * ratio); // which also clears it
      canvas.height = Math.round(12 * ratio);
      const g = canvas.getContext("2d");
      g.scale(ratio, ratio);
      const x = (t) => width * (1 - (now - t) / SHOWN_MS);
      g.fillStyle = line;
      for (const { begin, end } of this.marks) g.fillRect(x(begin), 0, x(end ?? now) - x(begin), 12);
      g.fillStyle = dim;
      for (const { begin, end } of rests) g.fillRect(x(begin), 5.5, x(end ?? now) - x(begin), 1);
      g.fillStyle = decode;
      for (const t of times) g.fillRect(x(t), 2, 1.5, 8);
      const gap = times.length ? now - times.at(-1) : 0;
      // Not the server's: its times come with the feed, some tenths of a second later.
      const isShown = this.abort && lane !== this.server;
      lane.gap.textContent = isShown ? lane.state || `${gap.toFixed(0)} ms ago` : "";
    }
    this.$("worst-here").textContent = this.worstHere ? `in this browser ${this.worstHere.toFixed(0)} ms` : "";
    const pill = this.$("worst");
    pill.textContent = this.worst ? `longest gap ${this.worst.toFixed(0)} ms` : "longest gap –";
    pill.className = `pill ${!this.worst || !objective ? "" : this.worst > objective ? "bad" : "good"}`;
  }
}
