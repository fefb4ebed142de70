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
    this.$("messages").append(box);
    this.scroll();
    return { box, body };
  }

  scroll() { const m = this.$("messages"); m.scrollTop = m.scrollHeight; }

  async send() {
    const text = this.$("input").value.trim();
    if (!text || this.abort) return;
    const messages = this.messages; // of this conversation; "New chat" begins another
    this.$("input").value = "";
    messages.push({ role: "user", content: text });
    this.bubble("user", text);
    const { box, body } = this.bubble("assistant", "");
    const thought = document.createElement("div"); // before an answer, and no part of it
    thought.className = "thought";
    box.prepend(thought);
    this.abort = new AbortController();
    this.$("stop").disabled = false;
    this.$("send").disabled = true;
    let answer = "", tokens = 0, timing = null, note = "";
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
        const { content, reasoning_content: reasoning } = data.choices[0]?.delta ?? {};
        if (!reasoning && !content) continue;
        answer += content ?? "";
        thought.append(reasoning ?? "");
        body.textContent = answer;
        this.scroll();
      }
    } catch (problem) {
      if (problem.name === "AbortError") note = "stopped";
      else { box.classList.add("error"); body.textContent = answer + problem.message; }
    }
    // An answer may be cut while the model still thinks: its question stays in the conversation.
    if (answer || thought.textContent || tokens) messages.push({ role: "assistant", content: answer });
    else messages.pop();
    const small = document.createElement("small");
    if (timing) {
      this.record.first(timing.ttft_ms);
      note = `${tokens} tokens, first after ${timing.ttft_ms.toFixed(0)} ms, longest gap ${timing.max_tbt_ms.toFixed(0)} ms`;
      if (timing.objective_kept !== null) note += timing.objective_kept ? ", objective kept" : ", objective missed";
    }
    small.textContent = note;
    box.append(small);
    this.abort = null;
    this.$("stop").disabled = true;
    this.$("send").disabled = false;
    this.scroll();
    this.focus();
  }
}
