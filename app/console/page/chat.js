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
    this.$("input").value = "";
    this.messages.push({ role: "user", content: text });
    this.bubble("user", text);
    const { box, body } = this.bubble("assistant", "");
    this.abort = new AbortController();
    this.$("stop").disabled = false;
    this.$("send").disabled = true;
    const begin = performance.now();
    let answer = "", last = null, first = null, tokens = 0, worst = 0, note = "";
    try {
      const request = {
        model: this.model(), messages: this.messages, stream_options: { include_usage: true },
        temperature: Number(this.$("temperature").value), max_tokens: Number(this.$("max-tokens").value),
      };
      for await (const { data, at } of stream("v1/chat/completions", request, this.abort.signal)) {
        tokens = data.usage?.completion_tokens ?? tokens;
        const piece = data.choices[0]?.delta?.content;
        if (!piece) continue;
        if (last === null) { first = at - begin; this.record.first(first); }
        else { worst = Math.max(worst, at - last); this.record.gap(at - last); }
        last = at;
        answer += piece;
        body.textContent = answer;
        this.scroll();
      }
    } catch (problem) {
      note = problem.name === "AbortError" ? "stopped; " : "";
      if (!note) { box.classList.add("error"); body.textContent = answer + problem.message; }
    }
    if (answer) this.messages.push({ role: "assistant", content: answer });
    else this.messages.pop();
    const small = document.createElement("small");
    if (first !== null)
      small.textContent = `${note}${tokens ? `${tokens} tokens, ` : ""}first after ${first.toFixed(0)} ms, longest gap ${worst.toFixed(0)} ms`;
    box.append(small);
    this.abort = null;
    this.$("stop").disabled = true;
    this.$("send").disabled = false;
    this.scroll();
    this.focus();
  }
}
