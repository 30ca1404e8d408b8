// The playground: a prompt with and without speculation, every token in the colour of its source.

import { stackedBar } from "./charts.js";
import { byId, el, facts, figure, percent } from "./dom.js";
import { chatEvents, Unauthorized } from "./server.js";
import { TokenText } from "./tokens.js";

class Pane {
  constructor(id, empty) {
    this.box = byId(id);
    const title = this.box.querySelector("h2");
    this.speed = el("span", { class: "speed", "aria-live": "off" });
    this.top = el("div", { class: "top" });
    title.replaceWith(this.top);
    this.top.append(title, this.speed);
    this.answer = el("div", {
      class: "answer", tabindex: 0, role: "group", "data-empty": empty,
      "aria-label": `${title.textContent}: the answer. Arrow keys go from token to token.`,
    });
    this.mix = el("div", { class: "mix" });
    this.figures = el("div");
    this.box.append(this.answer, this.mix, this.figures);
    this.tokens = new TokenText(this.answer);
    this.reset();
  }

  reset() {
    this.tokens.clear();
    this.startedAt = this.first = this.latest = null;
    this.early = 0;
    this.metrics = null;
    this.failed = "";
    this.speed.textContent = "";
    this.mix.replaceChildren();
    this.figures.replaceChildren();
    this.box.dataset.state = "empty";
  }

  begin() {
    this.reset();
    this.box.dataset.state = "running";
    this.startedAt = performance.now();
  }

  take(event) {
    const choice = event.choices[0];
    if (!choice) return;
    const entries = choice.token_sources ?? [];
    if (entries.length) {
      this.latest = performance.now();
      if (this.first === null) [this.first, this.early] = [this.latest, entries.length];
    }
    this.tokens.add(choice.delta.content ?? "", entries);
    if (event.metrics) this.metrics = event.metrics.speculative_decoding;
    this.render();
  }

  end(state, failed = "") {
    this.failed = failed;
    if (state === "done") this.tokens.finish();
    this.render();
    this.box.dataset.state = state;
  }

  // Tokens per second after the first chunk: without queue and prefill.
  rate() {
    const seconds = (this.latest - this.first) / 1000;
    const after = this.tokens.entries.length - this.early;
    return seconds > 0 && after > 0 ? after / seconds : null;
  }

  render() {
    const { counts } = this.tokens, total = this.tokens.entries.length;
    const rate = this.rate();
    this.speed.textContent = rate === null ? "" : `${figure(rate, 0)} tokens/s`;
    const parts = Object.entries(counts).filter(([, number]) => number).map(([kind, number]) => (
      { kind, share: number / total, name: `${kind} ${number}` }));
    this.mix.replaceChildren(stackedBar(parts, `Of ${total} tokens: ${parts.map(({ name }) => name).join(", ")}`));
    this.figures.replaceChildren(this.failed ? el("p", { class: "failed" }, this.failed) : "", facts(this.rows(counts, total)));
  }

  rows(counts, total) {
    const rows = [["tokens", `${total}: ` + Object.entries(counts).filter(([, n]) => n).map(([k, n]) => `${n} ${k}`).join(", ")]];
    if (this.first !== null) rows.push(["first token after", `${figure(this.first - this.startedAt, 0)} ms`]);
    const own = this.metrics;
    if (own) {
      rows.push(["topic", own.topic]);
      if (own.num_draft_tokens) {
        rows.push(["draft", `${own.draft}, version ${own.weight_version}`]);
        rows.push(["acceptance rate", `${own.num_accepted_draft_tokens} of ${own.num_draft_tokens}, ${percent(own.draft_acceptance_rate)}`]);
        rows.push(["mean acceptance length", figure(own.mean_acceptance_length)]);
      }
      if (own.num_suffix_tokens) rows.push(["accepted of suffixes", `${own.num_accepted_suffix_tokens} of ${own.num_suffix_tokens}`]);
    }
    return rows;
  }
}

export class Playground {
  constructor(onUnauthorized) {
    this.model = "paceline";
    this.onUnauthorized = onUnauthorized;
    this.on = new Pane("pane-on", "The answer appears here.");
    this.off = new Pane("pane-off", "The same prompt without speculation.");
    this.running = null;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.running) void this.run();
    });
    byId("cancel").addEventListener("click", () => this.running?.abort());
    byId("ask").elements.compare.addEventListener("change", () => this.arrange());
  }

  arrange() {
    const compare = byId("ask").elements.compare.checked;
    this.off.box.hidden = !compare;
    this.off.box.parentElement.classList.toggle("single", !compare);
  }

  // Drafts for requests: experts, and their initial weights.
  offer(drafts) {
    const box = byId("draft"), wanted = box.value;
    const names = ["auto", ...Object.keys(drafts).filter((name) => !name.endsWith("@candidate")).sort()];
    if (names.join() === [...box.options].map((option) => option.value).join()) return;
    box.replaceChildren(...names.map((name) => el("option", { value: name }, name.endsWith("@0") ? `${name} (frozen)` : name)));
    box.value = names.includes(wanted) ? wanted : "auto";
  }

  body(speculative) {
    const { prompt, max_tokens, temperature, seed, store } = byId("ask").elements;
    const body = {
      model: this.model, stream: true, store: store.checked, return_token_sources: true, speculative,
      messages: [{ role: "user", content: prompt.value }],
      max_tokens: Number(max_tokens.value), temperature: Number(temperature.value),
    };
    if (seed.value.trim()) body.seed = Number(seed.value);
    return body;
  }

  // One after the other: concurrent runs would share rounds and slow each other down.
  async run() {
    const { draft, k, compare } = byId("ask").elements;
    const speculative = { draft: draft.value };
    if (k.value.trim()) speculative.num_speculative_tokens = Number(k.value);
    const runs = [[this.on, this.body(speculative)]];
    if (compare.checked) runs.push([this.off, this.body({ draft: "off" })]);
    this.running = new AbortController();
    byId("run").disabled = true;
    byId("cancel").disabled = false;
    byId("verdict").textContent = "";
    for (const pane of [this.on, this.off]) pane.reset();
    try {
      for (const [pane, body] of runs) await this.stream(pane, body, this.running.signal);
    } finally {
      this.running = null;
      byId("run").disabled = false;
      byId("cancel").disabled = true;
    }
    byId("verdict").textContent = this.verdict(compare.checked, runs[0][1]);
  }

  async stream(pane, body, signal) {
    if (signal.aborted) return;
    pane.begin();
    try {
      for await (const event of chatEvents(body, signal)) pane.take(event);
      pane.end("done");
    } catch (error) {
      if (error instanceof Unauthorized) this.onUnauthorized(error.message);
      pane.end("failed", signal.aborted ? "Cancelled." : error.message);
    }
  }

  verdict(compared, body) {
    const panes = [this.on, this.off];
    if (!compared || panes.some((pane) => pane.box.dataset.state !== "done")) return "";
    const [fast, slow] = panes.map((pane) => pane.rate());
    const speed = fast && slow ? ` ${figure(fast / slow)}× the speed with speculation.` : "";
    if (this.on.tokens.text === this.off.tokens.text) return `The same text, character for character.${speed}`;
    const unseeded = body.temperature > 0 && body.seed === undefined;
    return unseeded ? `Sampled without a seed, so the texts differ by chance.${speed}` : `The texts differ.${speed}`;
  }
}
