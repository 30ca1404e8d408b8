// Requests to the server of this page; its headers forbid any other.

const ROOT = new URL("..", document.baseURI);
const KEY = "paceline-api-key";

export class Unauthorized extends Error {}

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function send(path, options) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${byteString(apiKey())}`;
  const answer = await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const message = await errorOf(answer);
  throw answer.status === 401 ? new Unauthorized(message) : new Error(message);
}

// Headers hold bytes, one per character; a key may hold any characters.
function byteString(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `HTTP ${answer.status}`;
  }
}

export async function getJson(path, timeoutMs = 8000) {
  const answer = await send(path, { signal: AbortSignal.timeout(timeoutMs) });
  return answer.json();
}

// Server-sent events of a chat completion, as objects, until the server's [DONE].
export async function* chatEvents(body, signal) {
  const answer = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const frames = (waiting + value).split("\n\n");
    waiting = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith(":")) continue; // a keep-alive comment
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
