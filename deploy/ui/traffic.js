// Recent traffic, summed over the replicas of the ingress.

const COUNTS = ["requests", "tokens", "rounds", "drafted", "accepted"];

export function armOf(draft) {
  if (draft === "off") return "plain";
  return draft.endsWith("@0") ? "frozen" : "online";
}

function nothing() {
  return { requests: 0, tokens: 0, rounds: 0, drafted: 0, accepted: 0 };
}

function add(sum, row) {
  for (const name of COUNTS) sum[name] += row[name];
}

export function acceptance(sum) {
  return sum.drafted ? sum.accepted / sum.drafted : null;
}

export function acceptanceLength(sum) {
  return sum.rounds ? 1 + sum.accepted / sum.rounds : null;
}

export class Traffic {
  constructor() {
    this.replicas = new Map();
    this.now = 0;
    this.bucket = 5;
    this.keep = 900;
    this.first = null;
  }

  // Take the view of one replica; a whole view replaces its rows, a partial one adds to them.
  merge(view, whole) {
    this.now = view.now;
    this.bucket = view.bucket_s;
    this.keep = view.keep_s;
    const rows = whole ? new Map() : (this.replicas.get(view.replica) ?? new Map());
    for (const values of view.rows) {
      const row = Object.fromEntries(view.columns.map((name, i) => [name, values[i]]));
      rows.set(`${row.at}|${row.topic}|${row.draft}`, row);
    }
    this.replicas.set(view.replica, rows);
    this.forget();
  }

  forget() {
    const oldest = this.now - this.keep;
    this.first = null;
    for (const [replica, rows] of this.replicas) {
      for (const [key, row] of rows) {
        if (row.at + this.bucket < oldest) rows.delete(key);
        else this.first = this.first === null ? row.at : Math.min(this.first, row.at);
      }
      if (!rows.size) this.replicas.delete(replica);
    }
  }

  *rows() {
    for (const rows of this.replicas.values()) yield* rows.values();
  }

  topics() {
    return new Set([...this.rows()].map((row) => row.topic));
  }

  // Sums of matching rows over the last seconds.
  total(seconds, fits = () => true) {
    const sum = nothing();
    for (const row of this.rows()) if (row.at > this.now - seconds - this.bucket && fits(row)) add(sum, row);
    return sum;
  }

  // Sums per bucket, including empty ones.
  buckets(fits) {
    const sums = new Map();
    for (const row of this.rows()) {
      if (!fits(row)) continue;
      if (!sums.has(row.at)) sums.set(row.at, nothing());
      add(sums.get(row.at), row);
    }
    const from = Math.ceil((this.now - this.keep) / this.bucket) * this.bucket;
    const found = [];
    for (let at = from; at <= this.now; at += this.bucket) found.push([at, sums.get(at) ?? nothing()]);
    return found;
  }

  // [time, value] of a figure over a sliding window; null without data.
  // The last bucket is incomplete: a rate over it is too low, a ratio is not.
  series(fits, seconds, value, withLast = true) {
    const buckets = this.buckets(fits);
    if (!withLast) buckets.pop();
    const width = Math.max(1, Math.round(seconds / this.bucket));
    return buckets.map(([at], i) => {
      const sum = nothing();
      for (const [, part] of buckets.slice(Math.max(0, i + 1 - width), i + 1)) add(sum, part);
      return [Math.min(at + this.bucket, this.now), value(sum, width * this.bucket)];
    });
  }

  // Requests by topic and drafting expert, without frozen drafts.
  shares() {
    const table = new Map();
    for (const row of this.rows()) {
      if (armOf(row.draft) !== "online" || !row.requests) continue;
      const own = table.get(row.topic) ?? new Map();
      own.set(row.draft, (own.get(row.draft) ?? 0) + row.requests);
      table.set(row.topic, own);
    }
    return table;
  }
}
