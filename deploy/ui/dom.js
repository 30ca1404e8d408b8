// Elements and number formats. Text becomes text nodes only: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  const kept = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...kept);
  return node;
}

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function figure(value, digits = 2) {
  return known(value) ? value.toFixed(digits) : "–";
}

export function percent(value) {
  return known(value) ? `${Math.round(100 * value)} %` : "–";
}

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function bytes(value) {
  if (!known(value)) return "–";
  return value < 2 ** 20 ? `${(value / 1024).toFixed(0)} KiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
}

export function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString("en-GB");
}

// A name and a value per row.
export function facts(rows) {
  return el("dl", { class: "facts" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// Place a tooltip next to a rectangle, inside the window.
export function placeTip(tip, box) {
  tip.hidden = false;
  const own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 8);
  const above = box.top - own.height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above >= 8 ? above : box.bottom + 8}px`;
}
