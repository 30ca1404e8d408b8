// The live part: acceptance, throughput, decisions on weights, training, replay.

import { LineChart, stackedBar } from "./charts.js";
import { byId, bytes, clock, count, el, facts, figure, known, percent } from "./dom.js";
import { acceptance, acceptanceLength, armOf, Traffic } from "./traffic.js";

const WINDOW_S = 45;
const SHORTEST_S = 120;
const DECISIONS = 60;

export class Live {
  constructor() {
    this.traffic = new Traffic();
    this.status = {};
    this.decisions = new Map();
    this.experts = [];
    this.cards = new Map();
    this.speed = new LineChart(byId("speed"));
  }

  take(status, view, whole) {
    this.traffic.merge(view, whole);
    this.status = status;
    for (const one of list(status.decisions)) {
      this.decisions.set(`${one.time}|${one.topic}|${one.outcome}|${one.version}`, one);
    }
    this.forget();
    const drafts = object(status.live_drafts);
    if (!drafts.error) { // else those from before
      // The generalist comes last.
      this.experts = Object.keys(drafts).sort((a, b) => (a === "general") - (b === "general"));
    }
    if (!this.experts.length) this.experts = [...this.traffic.topics()].sort();
  }

  // The table shows the last decisions, the charts mark those of their time.
  forget() {
    const oldest = this.traffic.now - this.traffic.keep;
    for (const [key, one] of [...this.decisions].slice(0, -DECISIONS)) {
      if (one.time < oldest) this.decisions.delete(key);
    }
  }

  draw() {
    this.from = this.traffic.now - this.span();
    this.drawTiles();
    for (const topic of this.experts) this.drawTopic(topic);
    this.drawSpeed();
    byId("shares").replaceChildren(...this.shares());
    byId("decisions").replaceChildren(this.decisionTable());
    byId("trainer").replaceChildren(this.trainer());
    byId("replay").replaceChildren(...this.replay());
  }

  // Charts start at the first data.
  span() {
    const { first, now, keep } = this.traffic;
    const seen = first === null ? 0 : now - first + this.traffic.bucket;
    return Math.min(keep, Math.max(SHORTEST_S, seen));
  }

  drawTiles() {
    const minute = this.traffic.total(60);
    const online = this.traffic.total(60, (row) => armOf(row.draft) === "online");
    const frozen = this.traffic.total(60, (row) => armOf(row.draft) === "frozen");
    const load = object(this.status.scheduler), trainer = object(this.status.trainer);
    const seconds = 60 + this.traffic.bucket / 2; // the last bucket is half full, on average
    const tiles = [
      ["Tokens per second", count(minute.tokens / seconds), `${figure(minute.requests / seconds, 1)} answers per second`],
      ["Acceptance rate", percent(acceptance(online)), `frozen drafts ${percent(acceptance(frozen))}`],
      ["Mean acceptance length", figure(acceptanceLength(online)), `frozen drafts ${figure(acceptanceLength(frozen))}`],
      ["Running requests", count(load.running), `${count(load.waiting)} waiting, ${count(load.replicas)} replicas`],
      ["Trainer", trainerText(trainer), permitRefusal(load) || (known(trainer.steps) ? `${count(trainer.steps)} steps of this draft` : ""), true],
      ["Published weight versions", count(trainer.published), `${count(trainer.rejected)} rejected`],
    ];
    byId("tiles").replaceChildren(...tiles.map(([name, value, more, words]) => el("li", {},
      el("p", { class: "name" }, name),
      el("p", { class: words ? "value words" : "value" }, value),
      el("p", { class: "more" }, more))));
  }

  card(topic) {
    if (!this.cards.has(topic)) {
      const head = el("header"), host = el("div", { class: "chart" });
      byId("topics").append(el("article", { class: "card topic", "data-topic": topic }, head, host));
      this.cards.set(topic, { head, chart: new LineChart(host) });
    }
    return this.cards.get(topic);
  }

  drawTopic(topic) {
    const { head, chart } = this.card(topic);
    const arm = (name) => (row) => row.topic === topic && armOf(row.draft) === name;
    const [online, frozen] = ["online", "frozen"].map((name) => this.traffic.series(arm(name), WINDOW_S, acceptance));
    const now = [online, frozen].map((points) => points.findLast(([, value]) => value !== null)?.[1]);
    const weights = object(object(this.status.live_drafts)[topic]);
    head.replaceChildren(
      el("h2", {}, topic),
      known(weights.stable) ? el("span", { class: "chip" }, `v${weights.stable}`) : "",
      known(weights.candidate)
        ? el("span", { class: "chip warn" }, `v${weights.candidate} canary (${weights.canary_requests})`) : "",
      el("span", { class: "rate" }, percent(now[0])),
      known(now[1]) ? el("span", { class: "twin" }, `frozen ${percent(now[1])}`) : "",
    );
    chart.update({
      label: `Acceptance of ${topic}: online ${percent(now[0])}, frozen ${percent(now[1])}`,
      from: this.from, to: this.traffic.now, top: 1,
      format: (value, exact) => (exact ? figure(value, 3) : percent(value).replace(" ", "")),
      series: [
        { name: "frozen", kind: "frozen", points: frozen },
        { name: "online", kind: "online", points: online, area: true },
      ],
      marks: this.marks(topic),
    });
  }

  marks(topic) {
    const found = [];
    for (const one of this.decisions.values()) {
      if (one.topic !== topic) continue;
      const word = outcome(one);
      if (word === "canary") found.push({ at: one.time, kind: "canary", name: "" });
      if (["published", "promoted", "restored"].includes(word)) found.push({ at: one.time, kind: "", name: `v${one.version}` });
      if (word === "rolled_back") found.push({ at: one.time, kind: "back", name: `✕ v${one.version}` });
    }
    return found.sort((a, b) => a.at - b.at);
  }

  drawSpeed() {
    const rate = (sum, seconds) => sum.tokens / seconds;
    const points = this.traffic.series(() => true, 15, rate, false);
    const most = Math.max(10, ...points.map(([, value]) => value));
    const step = 10 ** Math.floor(Math.log10(most));
    this.speed.update({
      label: `Tokens per second, at most ${count(most)}`,
      from: this.from, to: this.traffic.now, top: Math.ceil(most / step) * step,
      format: (value) => count(value),
      series: [{ name: "tokens per second", kind: "", points, area: true }],
      marks: [],
    });
  }

  shares() {
    const table = this.traffic.shares();
    if (!table.size) return [el("p", { class: "empty" }, "No requests yet. Send one from the playground.")];
    return [...table].sort().map(([topic, drafts]) => {
      const total = [...drafts.values()].reduce((a, b) => a + b, 0);
      const parts = [...drafts].sort((a, b) => b[1] - a[1]).map(([draft, requests]) => (
        { share: requests / total, kind: this.colour(draft), name: `${draft} ${percent(requests / total)}` }));
      const words = parts.map(({ kind, name }) => el("span", { class: "part" }, el("span", { class: `swatch ${kind}` }), name));
      return el("div", { class: "share" },
        el("p", { class: "words" }, el("span", {}, `${topic} (${count(total)})`), el("span", {}, words)),
        stackedBar(parts, `${topic}: ${parts.map(({ name }) => name).join(", ")}`),
        this.measured(topic));
    });
  }

  // Mean acceptance of all experts on the same answers, from the expert evaluation.
  measured(topic) {
    const means = Object.entries(object(object(object(this.status.routing).acceptance)[topic]));
    if (means.length < 2) return null;
    const best = means.sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, mean]) => `${name} ${figure(mean)}`);
    return el("p", { class: "note" }, `evaluated on the same answers: ${best.join(", ")}`);
  }

  colour(draft) {
    const expert = draft.split("@")[0];
    return expert === "general" ? "e0" : `e${1 + (Math.max(0, this.experts.indexOf(expert)) % 7)}`;
  }

  decisionTable() {
    const rows = [...this.decisions.values()].sort((a, b) => b.time - a.time).slice(0, DECISIONS);
    if (!rows.length) return el("p", { class: "empty" }, "None yet: the trainer runs while serving is idle, and the gate decides on its weights.");
    const names = ["time", "topic", "decision", "version", "before", "after", "evidence"];
    return el("table", {},
      el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((one) => decisionRow(one))));
  }

  trainer() {
    const trainer = object(this.status.trainer), load = object(this.status.scheduler);
    if (!this.status.trainer) return el("p", { class: "empty" }, "Training is off.");
    if (trainer.error) return el("p", { class: "empty" }, "The trainer does not answer; it restarts by itself.");
    const granted = load.permits_requested ? percent(load.permits_granted / load.permits_requested) : "–";
    return facts([
      ["state", trainerText(trainer)],
      ["permit", permitRefusal(load) || "granted"],
      ["permit requests, granted", `${count(load.permits_requested)}, ${granted}`],
      ...leases(load),
      ["training time", known(trainer.training_s) ? `${count(trainer.training_s)} s` : "–"],
      ["loss", figure(trainer.loss, 3)],
      ["failed rounds", count(trainer.failures)],
    ]);
  }

  replay() {
    const shards = Object.entries(object(this.status.shards));
    const most = Math.max(1, ...shards.map(([, own]) => ["train", "held_out", "synthetic"].reduce((sum, split) => sum + records(own, split), 0)));
    return shards.map(([topic, own]) => {
      if (own.error) return el("p", { class: "share" }, `${topic}: does not answer`);
      const parts = [
        { share: records(own, "train") / most, kind: "e1", name: "train" },
        { share: records(own, "held_out") / most, kind: "e2", name: "held out" },
        { share: records(own, "synthetic") / most, kind: "e3", name: "synthetic" },
      ];
      const synthetic = records(own, "synthetic") ? ` + ${count(records(own, "synthetic"))} synthetic` : "";
      const words = `${count(records(own, "train"))} + ${count(records(own, "held_out"))} held out${synthetic}, ${bytes(own.bytes)}`;
      return el("div", { class: "share" },
        el("p", { class: "words" }, el("span", {}, topic), el("span", {}, words)),
        stackedBar(parts, `${topic}: ${words}`));
    });
  }
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

// A part that does not answer is {"error": reason}.
function object(value) {
  return value && typeof value === "object" ? value : {};
}

function trainerText(trainer) {
  if (trainer.error) return "does not answer";
  if (!trainer.state) return "off";
  return trainer.topic && ["training", "evaluating"].includes(trainer.state) ? `${trainer.state} ${trainer.topic}` : trainer.state;
}

const records = (shard, split) => object(object(shard.splits)[split]).records ?? 0;

// Leases of trainers, and the use of idle time; none from a scheduler without leases.
function leases(load) {
  if (!load.leases) return [];
  const idle = Object.values(object(load.idle_s)).reduce((sum, seconds) => sum + seconds, 0);
  const now = load.leases.map((one) => (one.topic ? `${one.state} (${one.topic})` : one.state));
  return [
    ["leases", now.join(", ") || "none"],
    ["idle time used", `${count(object(load.idle_s).used)} of ${count(idle)} s`],
    ["longest yield, killed", `${known(load.longest_yield_s) ? `${count(1000 * load.longest_yield_s)} ms` : "–"}, ${count(object(load.leases_ended).killed)}`],
  ];
}

// Why the trainer has no permit now.
function permitRefusal(load) {
  if (!known(load.permits_requested)) return "";
  return load.paused ? "paused" : load.may_train ? "" : "refused: serving is busy";
}

// `canary` is a version that is published for a part of the requests.
function outcome(one) {
  return one.outcome === "published" && one.canary ? "canary" : one.outcome;
}

const WORDS = {
  canary: ["canary", "warn"], published: ["published", "good"], promoted: ["promoted", "good"],
  rolled_back: ["rolled back", "bad"], rejected: ["rejected", ""], refused: ["refused", "bad"], drift: ["drift", "warn"],
  plateau: ["plateau", ""],
  kept: ["kept", ""], restored: ["restored", "warn"], added: ["added", "good"],
};

function decisionRow(one) {
  const [word, kind] = WORDS[outcome(one)] ?? [String(one.outcome), ""];
  const [before, after] = acceptances(one);
  return el("tr", {},
    el("td", {}, clock(one.time)), el("td", {}, one.topic),
    el("td", {}, el("span", { class: `chip ${kind}` }, word)),
    el("td", {}, known(one.version) ? String(one.version) : "–"),
    el("td", {}, figure(before, 3)), el("td", {}, figure(after, 3)),
    el("td", { class: "why" }, evidence(one)));
}

function acceptances(one) {
  const pairs = [["stable_acceptance", "canary_acceptance"], ["acceptance_before", "acceptance"],
    ["acceptance_slow", "acceptance_fast"]];
  const [before, after] = pairs.find((names) => names.some((name) => name in one))
    ?? ["served_expected_acceptance", "candidate_expected_acceptance"];
  return [one[before], one[after]];
}

function evidence(one) {
  const parts = [];
  if (known(one.gain_lower_bound)) parts.push(`gain at least ${figure(one.gain_lower_bound, 3)}`);
  if (known(one.records)) parts.push(`${one.records} held-out records`);
  if (known(one.canary_requests)) parts.push(`${one.canary_requests} canary and ${one.stable_requests} stable requests`);
  if (known(one.restored_from)) parts.push(`weights of version ${one.restored_from}`);
  if (one.reason && one.reason !== "better") parts.push(one.reason);
  return parts.join(", ");
}
