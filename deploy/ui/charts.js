// Line charts in SVG: grid, area, marks, and a readout at the pointer.

import { byId, el, placeTip, svg } from "./dom.js";

const LEFT = 34, RIGHT = 10, TOP = 16, BOTTOM = 20;

export class LineChart {
  constructor(host, height = 150) {
    this.host = host;
    this.height = height;
    this.data = null;
    this.pointer = null;
    new ResizeObserver(() => this.draw()).observe(host);
    host.addEventListener("pointermove", (event) => this.read(event));
    host.addEventListener("pointerleave", () => this.leave());
  }

  // data: {label, from, to, top, format, series: [{name, kind, points}], marks: [{at, name, kind}]}
  update(data) {
    this.data = data;
    this.draw();
  }

  x(at) {
    const { from, to } = this.data;
    return LEFT + ((at - from) / (to - from)) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return this.height - BOTTOM - (value / this.data.top) * (this.height - TOP - BOTTOM);
  }

  draw() {
    this.width = this.host.clientWidth;
    if (!this.data || this.width < 60) return;
    const plot = svg("svg", {
      class: "plot", role: "img", "aria-label": this.data.label,
      height: this.height, viewBox: `0 0 ${this.width} ${this.height}`,
    });
    plot.append(...this.grid(), ...this.marks(), ...this.data.series.flatMap((one) => this.line(one)));
    if (!this.data.series.some(({ points }) => points.some(([at, value]) => at >= this.data.from && value !== null))) {
      plot.append(svg("text", { class: "nothing", x: this.width / 2, y: this.y(this.data.top / 2) - 8, "text-anchor": "middle" }, "no drafts yet"));
    }
    this.cross = svg("line", { class: "cross", y1: TOP, y2: this.height - BOTTOM, visibility: "hidden" });
    plot.append(this.cross);
    this.host.replaceChildren(plot);
    if (this.pointer !== null) this.show();
  }

  grid() {
    const { top, format, from, to } = this.data;
    const parts = [0, top / 2, top].flatMap((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(value), y2: this.y(value) }),
      svg("text", { x: LEFT - 6, y: this.y(value) + 4, "text-anchor": "end" }, format(value)),
    ]);
    const step = [30, 60, 120, 300].find((size) => (to - from) / size <= 5.5) ?? 600;
    for (let back = step; back < to - from; back += step) {
      const words = step < 60 ? `−${back} s` : `−${back / 60} min`;
      parts.push(svg("text", { x: this.x(to - back), y: this.height - 4, "text-anchor": "middle" }, words));
    }
    parts.push(svg("text", { x: this.width - RIGHT, y: this.height - 4, "text-anchor": "end" }, "now"));
    return parts;
  }

  line({ kind, points, area }) {
    const parts = [];
    for (const run of runs(points.filter(([at]) => at >= this.data.from))) {
      const spots = run.map(([at, value]) => `${this.x(at).toFixed(1)} ${this.y(Math.min(value, this.data.top)).toFixed(1)}`);
      if (area) {
        const floor = this.y(0).toFixed(1);
        const ends = `L${this.x(run.at(-1)[0]).toFixed(1)} ${floor} L${this.x(run[0][0]).toFixed(1)} ${floor} Z`;
        parts.push(svg("path", { class: "area", d: `M${spots.join(" L")} ${ends}` }));
      }
      if (run.length > 1) parts.push(svg("path", { class: `${kind} line`, d: `M${spots.join(" L")}` }));
      const [cx, cy] = spots.at(-1).split(" ");
      parts.push(svg("circle", { class: `${kind} dot`, cx, cy, r: run.length > 1 ? 2.6 : 2.2 }));
    }
    return parts;
  }

  marks() {
    let last = -Infinity;
    return this.data.marks.filter(({ at }) => at >= this.data.from).flatMap(({ at, name, kind }) => {
      const x = this.x(at);
      const parts = [svg("line", { class: `mark ${kind}`, x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM })];
      if (name && x - last > 24) {
        parts.push(svg("text", { class: `mark-name ${kind}`, x, y: TOP - 4, "text-anchor": "middle" }, name));
        last = x;
      }
      return parts;
    });
  }

  read(event) {
    this.pointer = event.clientX - this.host.getBoundingClientRect().left;
    this.show();
  }

  leave() {
    this.pointer = null;
    this.cross?.setAttribute("visibility", "hidden");
    byId("tip").hidden = true;
  }

  show() {
    if (!this.data || !this.cross) return;
    const near = nearest(this.data.series, (at) => Math.abs(this.x(at) - this.pointer), this.data.from);
    if (near === null) return;
    const x = this.x(near);
    for (const end of ["x1", "x2"]) this.cross.setAttribute(end, x);
    this.cross.setAttribute("visibility", "visible");
    const rows = this.data.series.map(({ name, points }) => {
      const found = points.find(([at]) => at === near);
      return [el("dt", {}, name), el("dd", {}, found && found[1] !== null ? this.data.format(found[1], true) : "–")];
    });
    const tip = byId("tip");
    tip.replaceChildren(el("strong", {}, `${Math.round(this.data.to - near)} s ago`), el("dl", {}, rows));
    const box = this.host.getBoundingClientRect();
    placeTip(tip, { left: box.left + x, width: 0, top: box.top + TOP, bottom: box.bottom });
  }
}

function nearest(series, distance, from) {
  const times = series.flatMap(({ points }) => points.filter(([at, value]) => at >= from && value !== null)).map(([at]) => at);
  return times.length ? times.reduce((best, at) => (distance(at) < distance(best) ? at : best)) : null;
}

// Points without a value interrupt a line.
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}

// A bar in parts: [{share, kind, name}], shares of 1.
export function stackedBar(parts, label) {
  let left = 0;
  const bars = parts.map(({ share, kind, name }) => {
    const bar = svg("rect", { class: kind, x: left, width: share, y: 0, height: 1 }, svg("title", {}, name));
    left += share;
    return bar;
  });
  return svg("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", role: "img", "aria-label": label }, bars);
}
