// Page: navigation, polling of the server, API key.

import { byId } from "./dom.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";
import { apiKey, getJson, keepApiKey, Unauthorized } from "./server.js";

const EVERY_MS = 2000;
const WHOLE_EVERY = 10; // polls: a poll reaches one replica of the ingress
const PART_S = 45;
const PARTS = ["live", "playground"];

const live = new Live();
const playground = new Playground(askForKey);
let polls = 0;

let shown = PARTS[0];

function show() {
  shown = PARTS.find((part) => location.hash === `#${part}`) ?? shown;
  for (const part of PARTS) {
    byId(`part-${part}`).hidden = part !== shown;
    if (part === shown) byId(`nav-${part}`).setAttribute("aria-current", "page");
    else byId(`nav-${part}`).removeAttribute("aria-current");
  }
  byId("tip").hidden = true;
}

function showBanner(text) {
  byId("banner").textContent = text;
  byId("banner").hidden = !text;
}

function askForKey(reason) {
  showBanner(reason);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

async function poll() {
  const whole = polls % WHOLE_EVERY === 0;
  if (whole) playground.model = (await getJson("v1/models")).data[0].id; // a restart may rename it
  const since = whole ? 0 : live.traffic.now - PART_S;
  const [status, view] = await Promise.all([
    getJson("v1/paceline/status"), getJson(`v1/paceline/live?since=${since}`),
  ]);
  polls += 1;
  live.take(status, view, whole);
  live.draw();
  playground.offer(status.target?.drafts ?? {});
  showServer(status.target ?? {});
  showBanner("");
}

function showServer(target) {
  const place = target.dtype ? `${target.dtype} on ${target.device}` : "the target does not answer";
  byId("server").textContent = `${playground.model}, ${place}`;
}

let waiting = null, busy = false;

async function turn() {
  clearTimeout(waiting);
  if (busy || document.hidden) return; // polled again when visible
  busy = true;
  try {
    await poll();
  } catch (error) {
    if (error instanceof Unauthorized) {
      askForKey(error.message);
      return; // polled again with a key
    }
    showBanner(`The server does not answer (${error.message}); retrying every two seconds.`);
  } finally {
    busy = false;
  }
  clearTimeout(waiting);
  waiting = setTimeout(turn, EVERY_MS);
}

byId("key-button").addEventListener("click", () => {
  byId("key").value = apiKey();
  byId("key-dialog").showModal();
});
byId("key-close").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepApiKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-dialog").close();
  void turn();
});
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => void turn());
show();
void turn();
