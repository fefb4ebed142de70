// Chat with streaming, parameters and stop.
import { stream } from "./sse.js";

export class Chat {
  constructor({ $, model, record }) {
    Object.assign(this, { $, model, record, messages: [], abort: null });
    $("composer").onsubmit = (event) => { event.preventDefault(); this.send(); };
    $("input").onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    };
    $("stop").onclick = () => this.abort?.abort();
    $("clear").onclick = () => { this.abort?.abort(); this.messages = []; $("messages").replaceChildren(); };
  }

  focus() { this.$("input").focus(); }

  bubble(role, text) {
    const box = document.createElement("div");
    box.className = `message ${role}`;
    const body = document.createElement("span");
    body.textContent = text;
    box.append(body);
    this.change(() => this.$("messages").append(box));
    return { box, body };
  }

  // The end stays in view, unless one has scrolled up from it to read.
  change(apply) {
    const m = this.$("messages");
    const isAtEnd = m.scrollHeight - m.scrollTop - m.clientHeight < 40;
    apply();
    if (isAtEnd) m.scrollTop = m.scrollHeight;
  }

  async send() {
    const text = this.$("input").value.trim();
    if (!text || this.abort) return;
    const messages = this.messages; // of this conversation; "New chat" begins another
    this.$("input").value = "";
    messages.push({ role: "user", content: text });
    this.bubble("user", text).box.scrollIntoView({ block: "nearest" });
    const { box, body } = this.bubble("assistant", "");
    const thought = document.createElement("div"); // before an answer, and no part of it
    thought.className = "thought";
    box.prepend(thought);
    this.abort = new AbortController();
    this.$("stop").disabled = false;
    this.$("send").disabled = true;
    let answer = "", thinking = "", tokens = 0, timing = null, note = "", reason = null, frame = 0;
    box.ariaBusy = "true"; // read aloud once it is whole
    // At most once a frame: each time costs as much as the answer is long, and its tokens may come faster.
    const show = () => {
      frame = 0;
      this.change(() => {
        if (thought.textContent !== thinking) thought.textContent = thinking;
        body.textContent = answer;
      });
    };
    try {
      // Of an empty field nothing is sent: the server has its own default.
      const number = (id) => (this.$(id).value === "" ? undefined : Number(this.$(id).value));
      const request = {
        model: this.model(), messages, stream_options: { include_usage: true, include_timing: true },
        temperature: number("temperature"), max_tokens: number("max-tokens"),
      };
      for await (const { data } of stream("v1/chat/completions", request, this.abort.signal)) {
        tokens = data.usage?.completion_tokens ?? tokens;
        timing = data.timing ?? timing;
        const choice = data.choices[0];
        reason = choice?.finish_reason ?? reason;
        answer += choice?.delta.content ?? "";
        thinking += choice?.delta.reasoning_content ?? "";
        frame ||= requestAnimationFrame(show);
      }
      if (!reason) throw new Error("The answer broke off.");
    } catch (problem) {
      note = problem.name === "AbortError" ? "stopped" : problem.message;
      box.classList.toggle("error", problem.name !== "AbortError");
    }
    cancelAnimationFrame(frame);
    show();
    // An answer may be cut while the model still thinks: its question stays in the conversation.
    if (answer || thinking || tokens) messages.push({ role: "assistant", content: answer });
    else messages.pop();
    const small = document.createElement("small");
    if (timing) {
      this.record.first(timing.ttft_ms);
      note = `${tokens} token${tokens === 1 ? "" : "s"}, first after ${timing.ttft_ms.toFixed(0)} ms, longest gap ${timing.max_tbt_ms.toFixed(0)} ms`;
      if (timing.objective_kept !== null) note += timing.objective_kept ? ", objective kept" : ", objective missed";
      if (reason === "length") note += ", cut at the token limit";
    }
    small.textContent = note;
    this.change(() => box.append(small));
    box.ariaBusy = "false";
    this.abort = null;
    this.$("stop").disabled = true;
    this.$("send").disabled = false;
    // Where the visitor still is; the buttons that are disabled now leave the focus to the page.
    if ([document.body, this.$("send"), this.$("stop")].includes(document.activeElement)) this.focus();
  }
}
