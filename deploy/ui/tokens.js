// A streamed answer, every token in the colour of its source.

import { byId, el, figure, placeTip } from "./dom.js";

const WORDS = {
  accepted: "accepted: draft token",
  recovered: "recovered: from the target, a draft token was rejected",
  bonus: "bonus: from the target, all draft tokens were accepted",
  forced: "forced: the only token that the grammar allows",
  plain: "plain: from the target, a round without drafts",
};

export class TokenText {
  constructor(host) {
    this.host = host;
    this.clear();
    host.addEventListener("pointerover", (event) => this.point(event.target));
    host.addEventListener("click", (event) => this.point(event.target));
    host.addEventListener("pointerleave", () => this.leave());
    host.addEventListener("blur", () => this.leave());
    host.addEventListener("keydown", (event) => this.key(event));
  }

  clear() {
    this.characters = []; // code points: the server counts offsets in them
    this.entries = [];
    this.spans = [];
    this.counts = { accepted: 0, recovered: 0, bonus: 0, forced: 0, plain: 0 };
    this.at = -1;
    this.host.replaceChildren();
  }

  get text() {
    return this.characters.join("");
  }

  add(text, entries) {
    this.characters.push(...text);
    const first = Math.max(0, this.entries.length - 1);
    for (const entry of entries) {
      const span = el("span", { class: `tok ${entry.source}` });
      this.entries.push(entry);
      this.counts[entry.source] += 1;
      this.spans.push(span);
      this.host.append(span);
    }
    for (let i = first; i < this.entries.length; i++) this.write(i);
  }

  // A token ends at the next one's offset; the last one's text may still grow.
  write(i) {
    const end = this.entries[i + 1]?.text_offset ?? this.characters.length;
    const text = this.characters.slice(this.entries[i].text_offset, end).join("");
    this.spans[i].textContent = text;
    this.spans[i].classList.toggle("newline", /^\n/.test(text));
  }

  // Mark the token that ended the answer without a text of its own.
  finish() {
    const last = this.spans.at(-1);
    if (last && !last.textContent) last.classList.add("end");
  }

  point(target) {
    const i = this.spans.indexOf(target);
    if (i >= 0) this.show(i);
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.leave();
    if (!step || !this.spans.length) return;
    event.preventDefault();
    this.show(Math.min(Math.max(this.at + step, 0), this.spans.length - 1));
  }

  show(i) {
    this.leave();
    this.at = i;
    this.spans[i].classList.add("here");
    byId("tip").replaceChildren(...describe(this.entries[i]));
    placeTip(byId("tip"), this.spans[i].getBoundingClientRect());
  }

  leave() {
    this.spans[this.at]?.classList.remove("here");
    byId("tip").hidden = true;
  }
}

function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(nothing)";
}

// A greedy or seeded request accepts a draft token if the target chooses the same one.
// Of what suffixes drafted, which have no version, the server keeps the rejected secret.
function acceptanceProbability({ acceptance_probability: probability, weight_version: version, source }) {
  if (probability !== null) return figure(probability, 3);
  if (source === "accepted") return "1, greedy or seeded";
  return source === "recovered" && version !== null ? "0, greedy or seeded" : null;
}

function describe(entry) {
  const rows = [];
  if (entry.draft !== null) {
    rows.push(["draft", entry.weight_version === null ? entry.draft : `${entry.draft}, version ${entry.weight_version}`]);
  }
  const probability = acceptanceProbability(entry);
  if (probability !== null) rows.push(["acceptance probability", probability]);
  rows.push(["target probability", figure(entry.target_probability, 3)]);
  return [
    el("strong", {}, el("code", {}, visible(entry.token)), " ", WORDS[entry.source]),
    entry.rejected_token === null ? "" : el("span", {}, "instead of ", el("code", {}, visible(entry.rejected_token))),
    el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
  ];
}
