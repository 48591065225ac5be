"use strict";
// The page of the server: a chat that streams, and the machine as GET status tells it. No library, no build step.
// Texts only ever enter the page as text, never as HTML.

const $ = (id) => document.getElementById(id);
const KINDS = ["weights", "kv", "compute", "staging", "cache", "free"];
const KIND_NAMES = { weights: "weights", kv: "KV cache", compute: "compute", staging: "staging", cache: "experts kept", free: "free" };
const WORK = ["attend", "experts", "widen", "upload", "hand_off", "output", "other"];
const WORK_OF = { layers: "attend", hand_down: "hand_off", hand_up: "hand_off" };
const SAVED = ["system", "temperature", "most", "think", "key"];

function make(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function problem(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

// --- chat

const empty = $("empty"); // what stands where no message is
let messages = [];
let running = null; // the AbortController of the answer that is being written
let canThink = false;

class Message {
  constructor(role) {
    empty.remove();
    this.element = make("article", undefined, `message ${role}`);
    this.said = make("div", undefined, "said");
    this.note = make("p", "", "note");
    this.element.append(make("h3", role === "user" ? "You" : "Model"), this.said, this.note);
    this.content = "";
    this.thoughts = "";
    $("log").append(this.element);
    this.follow();
  }

  say(text) {
    this.content += text;
    if (this.isDue) return;
    this.isDue = true; // painted once a frame, however many tokens come
    requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.isDue = false;
    this.said.replaceChildren(...fenced(this.content));
    this.follow();
  }

  // While busy, screen readers wait; then they read the message once.
  set isBusy(value) {
    this.element.setAttribute("aria-busy", value);
    if (!value) this.paint();
  }

  think(text) {
    if (!this.thoughts) {
      const box = make("details");
      this.thinking = make("span");
      box.append(make("summary", "Thoughts"), this.thinking);
      this.said.before(box);
    }
    this.thoughts += text;
    this.thinking.textContent = this.thoughts;
    this.follow();
  }

  fail(text) {
    this.element.append(make("p", text, "error"));
    this.follow();
  }

  follow() {
    const log = $("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
  }
}

// Text with blocks of code between ``` fences as <pre>.
function fenced(text) {
  return text.split("```").map((part, i) => {
    if (i % 2 === 0) return document.createTextNode(part);
    const pre = make("pre");
    pre.append(make("code", part.replace(/^[\w+-]*\n/, "")));
    return pre;
  });
}

async function send(text) {
  const conversation = messages; // "New chat" begins another one meanwhile
  const question = new Message("user");
  question.say(text);
  question.paint();
  conversation.push({ role: "user", content: text });
  const answer = new Message("assistant");
  answer.isBusy = true;
  running = new AbortController();
  showRunning(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) take(answer, event);
  } catch (error) {
    if (error.name === "AbortError") answer.note.textContent = "stopped";
    else answer.fail(error.message);
  }
  if (answer.content || answer.thoughts) conversation.push(asMessage(answer));
  else conversation.pop();
  answer.isBusy = false;
  running = null;
  showRunning(false);
}

function request() {
  const system = $("system").value.trim();
  const most = Number($("most").value);
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number($("temperature").value),
    stream: true,
    return_progress: true,
    ...(most > 0 ? { max_tokens: most } : {}),
    ...(canThink && !$("think").checked ? { chat_template_kwargs: { enable_thinking: false } } : {}),
  };
}

function asMessage(answer) {
  const thoughts = answer.thoughts ? { reasoning_content: answer.thoughts } : {};
  return { role: "assistant", content: answer.content, ...thoughts };
}

function take(answer, event) {
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices[0];
  const progress = event.prompt_progress;
  if (progress) answer.note.textContent = `reading: ${progress.processed} of ${progress.total} tokens`;
  if (choice?.delta.reasoning_content) answer.think(choice.delta.reasoning_content);
  if (choice?.delta.content) answer.say(choice.delta.content);
  if (event.timings) answer.note.textContent = told(event.timings, choice?.finish_reason);
}

function told(t, reason) {
  const cached = t.cache_n ? ` (${t.cache_n} more were cached)` : "";
  const read = `${t.prompt_n} tokens read at ${t.prompt_per_second.toFixed(1)}/s${cached}`;
  const written = `${t.predicted_n} written at ${t.predicted_per_second.toFixed(1)}/s`;
  return `${read}, ${written}${reason === "length" ? ", ended by a limit" : ""}`;
}

// The data of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function showRunning(isRunning) {
  $("send").disabled = isRunning;
  $("stop").disabled = !isRunning;
}

function submit() {
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  send(text);
}

function bindChat() {
  $("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", () => {
    running?.abort();
    messages = [];
    $("log").replaceChildren(empty);
    $("text").focus();
  });
  for (const id of SAVED) {
    const box = $(id);
    const value = localStorage.getItem(`overspill.${id}`);
    if (value !== null) { if (box.type === "checkbox") box.checked = value === "true"; else box.value = value; }
    box.addEventListener("change", () => {
      localStorage.setItem(`overspill.${id}`, box.type === "checkbox" ? box.checked : box.value);
    });
  }
}

// --- machine

let last = null; // the status before, for rates

async function watch() {
  try {
    if (!document.hidden) show(await get("status"), await get("slots"));
    setTimeout(watch, 1000);
  } catch (error) {
    health(false, error.message);
    setTimeout(watch, 3000);
  }
}

async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (response.status === 401) $("settings").open = true; // where the key is typed
  if (!response.ok) throw new Error(await problem(response));
  return response.json();
}

function health(isGood, text) {
  $("health").className = isGood ? "good" : "bad";
  if ($("health-text").textContent !== text) $("health-text").textContent = text;
}

function show(status, slots) {
  const { model, plan } = status;
  canThink = model.can_think;
  $("think").disabled = !canThink;
  health(!status.trouble, status.trouble ?? "ready");
  $("model").title = model.name;
  $("model").textContent = `${model.name.split("/").pop()} · ${model.architecture} · ${count(model.n_params)} parameters · ` +
    `${bytes(model.bytes)} · context ${model.n_ctx}`;
  $("rates").replaceChildren(...rates(status, slots).map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", name), make("dd", value));
    return box;
  }));
  const wave = chosenWave(status);
  $("devices").replaceChildren(...status.devices.map((device) => deviceView(device, wave)));
  showWave(wave, plan);
  $("slots").replaceChildren(...slots.map((slot) => make("li", slotText(slot))));
  $("images").textContent = imagesText(status.images);
  $("images").hidden = !status.images.total_bytes;
  last = status;
}

function rates(status, slots) {
  const now = status.requests;
  const before = last?.requests ?? now;
  const rate = (n, s) => (now[s] > before[s] ? (now[n] - before[n]) / (now[s] - before[s]) : now[s] ? now[n] / now[s] : 0);
  const nBusy = slots.filter((slot) => slot.is_processing).length;
  const { plan } = status;
  const inHost = plan.expert_bytes ? 1 - plan.host_expert_bytes / plan.expert_bytes : 1;
  return [
    ["prompt tokens/s", rate("prompt_tokens", "prompt_seconds").toFixed(1)],
    ["generated tokens/s", rate("generated_tokens", "generated_seconds").toFixed(1)],
    ["running / waiting", `${nBusy} / ${now.waiting}`],
    ["prompts from cache", percent(now.cached_tokens / Math.max(1, now.cached_tokens + now.prompt_tokens))],
    ["experts on devices", percent(inHost)],
    ["uploaded in all", bytes(status.counters.uploaded_bytes ?? 0)],
  ];
}

function deviceView(device, wave) {
  const box = make("div", undefined, "device");
  const used = device.weights_bytes + device.kv_bytes + device.compute_bytes + device.staging_bytes + device.cache_bytes;
  const total = Math.max(device.total_bytes, used, 1);
  const parts = { ...device, free_bytes: total - used };
  const title = make("p");
  title.append(make("strong", device.name), make("span", `${bytes(used)} of ${bytes(device.total_bytes)}`));
  const bar = make("div", undefined, "bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", KINDS.map((kind) => `${KIND_NAMES[kind]} ${bytes(parts[`${kind}_bytes`])}`).join(", "));
  for (const kind of KINDS) {
    const part = make("i", undefined, kind);
    part.style.width = `${(100 * parts[`${kind}_bytes`]) / total}%`;
    part.title = `${KIND_NAMES[kind]} ${bytes(parts[`${kind}_bytes`])}`;
    if (parts[`${kind}_bytes`] > 0) bar.append(part);
  }
  box.append(title, bar, make("p", deviceFacts(device, wave), "facts"));
  return box;
}

function deviceFacts(device, wave) {
  const seen = wave?.devices.find((one) => one.name === device.name);
  const facts = device.n_layers ? [plural(device.n_layers, "layer")] : [];
  const sinceStart = device.busy === null ? "" : ` (${percent(device.busy)} since start)`;
  if (seen) facts.push(`busy ${percent(seen.busy)}${sinceStart}`);
  const link = device.link_gbps ? `link ${device.link_gbps.toFixed(1)} GB/s` : "";
  if (seen?.uploaded_bytes) facts.push(`uploads ${seen.upload_gbps.toFixed(1)} GB/s${link && `, ${link}`}`);
  else if (link) facts.push(link);
  return facts.join(" · ");
}

function chosenWave(status) {
  const name = document.querySelector("input[name=wave]:checked").value;
  return status[name] ?? null;
}

let shownWave = ""; // what the picture is of, so that it is drawn once

function showWave(wave, plan) {
  const name = wave && `${wave.n_tokens} ${wave.wall_us}`;
  if (!wave || name === shownWave) return;
  shownWave = name;
  const sent = wave.devices.reduce((sum, device) => sum + device.uploaded_bytes, 0);
  $("wave-text").textContent = `${plural(wave.n_tokens, "token")} in ${plural(wave.n_ubatches, "ubatch", "ubatches")}, ${seconds(wave.wall_us)}, ` +
    `${bytes(sent)} uploaded; prompts run ${plan.schedule}, grain ${plan.grain}`;
  $("gantt").replaceChildren(gantt(wave));
  const kinds = new Set(wave.devices.flatMap((d) => d.rows.flatMap((row) => row.spans.map(([kind]) => work(kind)))));
  legend($("gantt-legend"), WORK.filter((kind) => kinds.has(kind)), (kind) => kind.replace("_", "-"));
}

const work = (kind) => { const name = WORK_OF[kind] ?? kind; return WORK.includes(name) ? name : "other"; };

// One row per device and stream, time to the right.
function gantt(wave) {
  const rows = wave.devices.flatMap((device) => device.rows.map((row) => ({ ...row, name: `${device.name} ${row.lane.replace("_", "-")}` })));
  const left = 130, width = 720, step = 20, height = rows.length * step + 22;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", "The wave in time: " + wave.devices.map((d) => `${d.name} computed ${percent(d.busy)} of it`).join(", "));
  const x = (us) => left + ((width - left - 8) * us) / wave.wall_us;
  for (let i = 0; i <= 4; i++) {
    const us = (wave.wall_us * i) / 4;
    svg.append(shape("line", { x1: x(us), x2: x(us), y1: 0, y2: rows.length * step }));
    const label = shape("text", { x: x(us), y: height - 6, "text-anchor": i === 4 ? "end" : "middle" });
    label.textContent = i ? seconds(us) : "0";
    svg.append(label);
  }
  rows.forEach((row, i) => {
    const name = shape("text", { x: 0, y: i * step + 14 });
    name.textContent = row.name;
    svg.append(name, shape("rect", { class: "track", x: left, y: i * step + 4, width: width - left - 8, height: step - 8 }));
    for (const [kind, start, end] of row.spans) {
      const bar = shape("rect", { class: work(kind), x: x(start), y: i * step + 3, width: Math.max(0.6, x(end) - x(start)), height: step - 6 });
      const title = shape("title", {});
      title.textContent = `${kind.replace("_", "-")}, ${seconds(start)} to ${seconds(end)}`;
      bar.append(title);
      svg.append(bar);
    }
  });
  return svg;
}

function shape(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function legend(list, kinds, nameOf) {
  list.replaceChildren(...kinds.map((kind) => {
    const item = make("li");
    item.append(make("i", undefined, kind), nameOf(kind));
    return item;
  }));
}

function slotText(slot) {
  if (!slot.is_processing) return `${slot.id}: idle`;
  const read = slot.n_prompt_tokens_cache + slot.n_prompt_tokens_processed;
  return `${slot.id}: ${read} of ${slot.n_prompt_tokens} tokens read, ${slot.next_token[0].n_decoded} written`;
}

// What slots held and host RAM keeps (--cache-ram).
function imagesText(images) {
  return `${plural(images.n, "saved slot")}, ${bytes(images.bytes)} of ${bytes(images.total_bytes)} host RAM; ` +
    `${plural(images.loaded, "time")} one was used again`;
}

const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

const percent = (share) => `${(100 * share).toFixed(0)} %`;

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const i = n > 0 ? Math.min(4, Math.floor(Math.log2(n) / 10)) : 0;
  return `${(n / 1024 ** i).toFixed(i > 2 ? 1 : 0)} ${units[i]}`;
}

const seconds = (us) => (us < 1e6 ? `${(us / 1e3).toFixed(1)} ms` : `${(us / 1e6).toFixed(2)} s`);

function count(n) {
  return n >= 1e9 ? `${(n / 1e9).toFixed(1)} B` : `${(n / 1e6).toFixed(1)} M`;
}

legend($("memory-legend"), KINDS, (kind) => KIND_NAMES[kind]);
bindChat();
watch();
