// The page of `weft serve`: asks for figures twice a second, and shows them. No library, no build.

const $ = (id) => document.getElementById(id);
const POINTS = 240, SIZES = Array.from({ length: 11 }, (_, i) => 2 ** i);
const WAITS = [0, 0.2, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100, 200]; // ms
const REASONS = {
  full: "it was full", overflow: "the next call did not fit", enough: "a worker was free", timeout: "its longest wait was over",
};
const histories = {}; // model -> ring of points
let token = "", model = "", after = 0, last = null, held = false, chosen = null, batches = {}, touched = 0;

const ms = (s) => s == null ? "–" : s >= 10 ? s.toFixed(1) + " s" : s >= 0.1 ? (1e3 * s).toFixed(0) + " ms"
  : s >= 1e-3 ? (1e3 * s).toFixed(1) + " ms" : (1e6 * s).toFixed(0) + " µs";
const short = (x) => x == null || !isFinite(x) ? "–" : x >= 1e6 ? (x / 1e6).toFixed(1) + " M" : x >= 1e4 ? (x / 1e3).toFixed(1) + " k"
  : x >= 100 || Number.isInteger(x) ? Math.round(x).toLocaleString("en") : x.toFixed(1);
const many = (n, what) => `${short(n)} ${what}${n === 1 ? "" : "s"}`;
const waitClass = (s) => s < 1e-3 ? "wait0" : s < 5e-3 ? "wait1" : s < 25e-3 ? "wait2" : "wait3";

function make(tag, attributes = {}, ...children) {
  const element = tag === "svg" || tag === "path" || tag === "line"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

async function send(path, body) {
  const headers = token ? { Authorization: "Bearer " + token } : {};
  const answer = await fetch(path, body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) });
  if (answer.status === 401) $("login").hidden = false;
  if (!answer.ok) throw new Error((await answer.json()).error || `status ${answer.status}`);
  return answer;
}

const ask = async (path, body) => (await send(path, body)).json();

// --- what comes from the server ---

async function poll() {
  if (!document.hidden) {
    try {
      take(await ask(`ui/state?after=${after}`));
    } catch (error) {
      say(error instanceof TypeError ? "the server does not answer" : error.message, "bad");
    }
  }
  setTimeout(poll, 500);
}

function say(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text; // a screen reader says it when it changes
  $("state").className = kind;
}

function take(state) {
  const before = last;
  last = state;
  const names = Object.keys(state.models);
  if (!names.includes(model)) choose(names[0]);
  if ($("models").childElementCount !== names.length) {
    $("models").replaceChildren(...names.map((name) => {
      const button = make("button", { type: "button" }, name);
      button.addEventListener("click", () => choose(name));
      return button;
    }));
  }
  for (const button of $("models").children) button.setAttribute("aria-current", button.textContent === model);
  for (const [name, now] of Object.entries(state.models)) {
    if (!now.recent) continue;
    const was = before?.models[name];
    if (now.calls < was?.calls && was.version === now.version) { batches = {}; after = 0; } // another process answers
    batches[name] = [...(batches[name] || []), ...now.recent].slice(-POINTS);
    for (const batch of now.recent) after = Math.max(after, batch.id);
    if (was?.recent && was.version === now.version && now.calls >= was.calls) note(name, was, now, state.time - before.time);
  }
  show();
}

function note(name, was, now, seconds) {
  const ran = now.batches - was.batches, seen = now.recent;
  const waits = seen.flatMap((batch) => batch.waits).sort((a, b) => a - b);
  (histories[name] ||= []).push({
    calls: (now.calls - was.calls) / seconds, rows: (now.rows - was.rows) / seconds,
    size: ran ? (now.rows - was.rows) / ran : null, waiting: now.waiting,
    wait: waits.length ? waits[Math.floor(0.99 * (waits.length - 1))] : null,
    run: seen.length ? seen.reduce((sum, batch) => sum + batch.seconds, 0) / seen.length : null,
  });
  histories[name].splice(0, histories[name].length - POINTS);
}

function choose(name) {
  model = name;
  hold(false);
  touched = 0;
  $("inputs").replaceChildren();
  $("answer").textContent = "";
  if (last) show();
}

// --- figures ---

function show() {
  const now = last.models[model];
  if (last.draining) say("shutting down", "bad");
  else if (now.hanging) say(`a batch of ${model} runs for too long`, "bad");
  else if (!now.ready) say(`${model} is not loaded ${now.problem}`, "bad");
  else say(`${model} version ${now.version} is ready`, "good");
  if (!now.recent) return;
  tiles(now);
  if (!held) bars(now);
  charts();
  sliders(now);
  forms(now);
}

function recent(key) {
  const points = (histories[model] || []).slice(-6).map((point) => point[key]).filter((x) => x != null);
  return points.length ? points.reduce((a, b) => a + b) / points.length : null;
}

function tiles(now) {
  const errors = Object.entries(now.statuses).filter(([code]) => code >= 400).reduce((sum, [, n]) => sum + n, 0);
  const all = now.rows + now.padding;
  const shown = [
    ["calls per second", short(recent("calls"))],
    ["rows in a batch", short(recent("size")), `of ${now.options.max_batch_size}`],
    ["waiting / running", `${now.waiting} / ${now.running}`],
    ["wait p50 / p99", now.waits ? `${ms(now.waits.p50)}` : "–", now.waits ? `/ ${ms(now.waits.p99)}` : ""],
    ["run p50 / p99", now.runs ? `${ms(now.runs.p50)}` : "–", now.runs ? `/ ${ms(now.runs.p99)}` : ""],
    ["padding", all ? (100 * now.padding / all).toFixed(1) + " %" : "–", "of all rows"],
    ["refused", short(now.rejected), "", now.rejected > 0],
    ["late", short(now.late), "", now.late > 0],
    ["answers with errors", short(errors), "", errors > 0],
    ["calls so far", short(now.calls), `in ${many(now.batches, "batch").replace("batchs", "batches")}`],
  ];
  const list = $("tiles");
  if (list.childElementCount !== shown.length)
    list.replaceChildren(...shown.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  shown.forEach(([, value, more, bad], i) => {
    const dd = list.children[i].lastChild;
    dd.className = bad ? "bad" : "";
    dd.replaceChildren(value, ...(more ? [" ", make("small", {}, more)] : []));
  });
}

function bars(now) {
  const list = batches[model] || [], box = $("batches");
  const fits = Math.max(8, Math.floor(box.clientWidth / (parseFloat(getComputedStyle(box.firstChild || box).width) < 11 ? 11 : 14)));
  const seen = list.slice(-fits);
  const most = Math.max(now.options.max_batch_size, ...seen.map((batch) => batch.size + batch.padding));
  const scale = Math.min(most, Math.ceil(1.25 * Math.max(4, ...seen.map((batch) => batch.size + batch.padding))));
  $("scale").textContent = many(scale, "row");
  box.replaceChildren(...seen.map((batch) => {
    const bar = make("div", { class: "bar", role: "option", id: `b${batch.id}`, "aria-selected": batch.id === chosen, "aria-label": told(batch) });
    batch.rows.forEach((rows, i) => {
      const block = make("i", { class: batch.error ? "failed" : waitClass(batch.waits[i]) });
      block.style.height = `${100 * rows / scale}%`;
      bar.append(block);
    });
    const rest = batch.size - batch.rows.reduce((a, b) => a + b, 0);
    for (const [rows, kind] of [[rest, "wait1"], [batch.padding, "padding"]]) if (rows > 0) {
      const block = make("i", { class: kind });
      block.style.height = `${100 * rows / scale}%`;
      bar.append(block);
    }
    bar.addEventListener("click", () => pick(batch.id));
    return bar;
  }));
  if (!seen.length) box.replaceChildren(make("p", { class: "hint" }, "No batch has run since this page was opened."));
  detail(list.find((batch) => batch.id === chosen) || seen.at(-1));
}

const told = (batch) => `${many(batch.calls, "call")}, ${many(batch.size, "row")}${batch.padding ? ` and ${batch.padding} of padding` : ""}, `
  + `ran ${ms(batch.seconds)}, closed because ${REASONS[batch.reason] || batch.reason}${batch.error ? `, failed with ${batch.error}` : ""}`;

function pick(id) {
  chosen = id;
  hold(true);
  for (const bar of $("batches").children) bar.setAttribute("aria-selected", bar.id === `b${id}`);
  $("batches").setAttribute("aria-activedescendant", `b${id}`);
  detail((batches[model] || []).find((batch) => batch.id === id));
}

function hold(on) {
  held = on;
  $("hold").setAttribute("aria-pressed", on);
  if (!on) chosen = null;
}

// Who waited for whom: the calls of a batch on one time axis, from the first one's arrival to the end of the run.
function detail(batch) {
  $("batch").replaceChildren();
  if (!batch) return;
  const longest = Math.max(...batch.waits, 0), all = longest + batch.seconds || 1;
  const calls = batch.waits.map((wait, i) => {
    const line = make("div"), gap = make("i"), waited = make("i", { class: waitClass(wait) }), run = make("i", { class: "run" });
    gap.style.width = `${100 * (longest - wait) / all}%`;
    waited.style.width = `${100 * wait / all}%`;
    run.style.width = `${100 * batch.seconds / all}%`;
    line.append(gap, waited, run);
    return make("div", { class: "call" }, `${many(batch.rows[i], "row")}, ${ms(wait)}`, line);
  });
  const text = told(batch);
  $("batch").replaceChildren(make("p", {}, text[0].toUpperCase() + text.slice(1) + "."),
    make("div", { class: "calls" }, ...calls.slice(0, held ? 64 : 4)));
}

const CHARTS = [["calls per second", "calls", short], ["rows per second", "rows", short], ["rows in a batch", "size", short], ["calls waiting", "waiting", short],
  ["wait, p99", "wait", ms], ["run, mean", "run", ms]];

function charts() {
  const points = histories[model] || [], box = $("charts");
  if (!box.childElementCount) {
    box.append(...CHARTS.map(([name]) => make("figure", {},
      make("figcaption", {}, make("span", {}, name), make("b")),
      make("svg", { role: "img", viewBox: `0 0 ${POINTS} 60`, preserveAspectRatio: "none" },
        make("line", { x1: 0, x2: POINTS, y1: 60, y2: 60 }), make("path", { class: "area" }), make("path")))));
  }
  CHARTS.forEach(([name, key, format], i) => {
    const [caption, svg] = box.children[i].children, [, area, path] = svg.children;
    const values = points.map((point) => point[key]);
    const most = Math.max(...values.filter((x) => x != null), 0);
    let line = "", begun = null, at = 0;
    values.forEach((value, j) => {
      if (value == null) return;
      at = POINTS - values.length + j;
      line += `${begun == null ? "M" : "L"}${at} ${(58 - 54 * value / (most || 1)).toFixed(1)}`;
      begun ??= at;
    });
    path.setAttribute("d", line);
    area.setAttribute("d", line && `${line}L${at} 60L${begun} 60Z`);
    const now = recent(key);
    caption.lastChild.textContent = now == null ? "–" : `${format(now)}, at most ${format(most)}`;
    svg.setAttribute("aria-label", `${name}: now ${now == null ? "none" : format(now)}, at most ${format(most)} in two minutes`);
  });
}

// --- sliders ---

function sliders(now) {
  if (Date.now() - touched > 1500) {
    $("size").value = Math.round(Math.log2(now.options.max_batch_size));
    $("wait").value = WAITS.reduce((best, wait, i) => Math.abs(wait - 1e3 * now.options.max_wait) < Math.abs(WAITS[best] - 1e3 * now.options.max_wait) ? i : best, 0);
    labels(now.options.max_batch_size, now.options.max_wait);
  }
  predict(now);
}

function labels(size, wait) {
  $("size-value").value = many(size, "row");
  $("wait-value").value = wait ? ms(wait) : "none";
  $("size").setAttribute("aria-valuetext", many(size, "row"));
  $("wait").setAttribute("aria-valuetext", wait ? ms(wait) : "no wait");
}

const wanted = () => ({ size: SIZES[$("size").value], wait: WAITS[$("wait").value] / 1e3 });

// With run(n) = per_row * n + per_batch and r rows per second, batches have n = min(max, r * run(n)) rows while all workers are
// busy, or what comes within the longest wait, if that is more. A call waits for the batch before, or for its own to fill.
function expected(now, size, wait) {
  const { per_row: a, per_batch: b } = now.fit, run = (n) => a * n + b, workers = now.options.parallel;
  const rate = recent("rows") || 0, most = workers * size / run(size), r = rate / workers;
  const busy = r * a < 1 ? r * b / (1 - r * a) : size;
  const one = rate / Math.max(recent("calls") || 0, 1e-9) || 1; // rows of a call
  const n = Math.min(size, Math.max(one, busy, wait ? one + rate * wait : 1));
  const filling = wait && n > busy ? Math.min(wait, (n - one) / Math.max(rate, 1e-9)) || wait : 0;
  const before = Math.min(1, r * run(n) / n) * run(n) / 2;
  return { rate, most, n, latency: filling / 2 + before + run(n), longest: Math.max(filling, wait && n < size ? wait : 0) + before * 2 + run(n) };
}

function predict(now) {
  const box = $("prediction");
  if (!now.fit) { box.textContent = "What these would do is shown when batches have run."; return; }
  const { size, wait } = Date.now() - touched < 1500 ? wanted() : { size: now.options.max_batch_size, wait: now.options.max_wait };
  const { rate, most, n, latency, longest } = expected(now, size, wait);
  const up = `A batch takes ${ms(now.fit.per_batch)} and ${ms(now.fit.per_row)} for each row: up to ${short(most)} rows per second. `;
  box.textContent = up + (rate > most ? `The present ${short(rate)} rows per second are more than that: calls queue up.`
    : rate < 0.05 ? "There is no load at present."
    : `At the present ${short(rate)} rows per second expect batches of about ${short(Math.round(n))} and a latency of about ${ms(latency)}, at worst about ${ms(longest)}.`);
}

let pending = null;
for (const id of ["size", "wait"]) $(id).addEventListener("input", () => {
  touched = Date.now();
  const { size, wait } = wanted();
  labels(size, wait);
  if (last) predict(last.models[model]);
  clearTimeout(pending);
  pending = setTimeout(async () => {
    try {
      const changed = await ask(`ui/models/${model}/options`, { max_batch_size: size, max_wait: wait });
      last.models[model].options = { ...last.models[model].options, ...changed };
      $("tuned").textContent = `Now: batches of up to ${many(changed.max_batch_size, "row")}, a wait of up to ${ms(changed.max_wait)}.`;
    } catch (error) { $("tuned").textContent = error.message; }
  }, 120);
});
$("tune").addEventListener("submit", (event) => event.preventDefault());

// --- calls ---

const isDigits = (now) => now.inputs.length === 1 && String(now.inputs[0].shape) === "-1,64" && now.inputs[0].datatype === "FP32"
  && now.outputs.some((output) => output.name === "digit");

function forms(now) {
  $("draw").hidden = !isDigits(now);
  $("call").hidden = isDigits(now) || !now.inputs.length;
  $("unknown").hidden = now.inputs.length > 0;
  if ($("inputs").childElementCount || !now.inputs.length) return;
  for (const input of now.inputs) {
    const size = input.shape.slice(1).map((n) => n < 0 ? 1 : n).reduce((a, b) => a * b, 1);
    const value = input.datatype === "BYTES" ? "" : JSON.stringify(Array(Math.min(size, 4096)).fill(input.datatype === "BOOL" ? false : 0));
    const what = input.datatype === "BYTES" ? "text, a row on each line" : `${input.datatype} of shape [1, ${input.shape.slice(1).join(", ")}]`;
    const field = make("textarea", { id: `in-${input.name}`, spellcheck: "false" });
    field.value = value;
    $("inputs").append(make("label", { for: field.id }, `${input.name}: ${what}`), field);
  }
}

// The first answers of a model that streams, each as it comes.
async function* answers(inputs) {
  if (!last.models[model].streams) { yield (await infer(inputs))[0]; return; }
  const reader = (await send(`v2/models/${model}/generate_stream`, { inputs })).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", count = 0;
  while (count < 100) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const answer = JSON.parse(event.slice("data: ".length));
      if (answer.error) throw new Error(answer.error);
      count++;
      yield answer;
    }
  }
  reader.cancel();
}

async function infer(inputs) {
  const began = performance.now();
  const answer = await ask(`v2/models/${model}/infer`, { inputs });
  return [answer, (performance.now() - began) / 1e3];
}

$("call").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const inputs = last.models[model].inputs.map(({ name, datatype, shape }) => {
      const text = $(`in-${name}`).value;
      const data = datatype === "BYTES" ? text.split("\n").filter((line) => line) : JSON.parse(text).flat(Infinity);
      const dims = shape.slice(1), known = dims.filter((n) => n >= 0).reduce((a, b) => a * b, 1);
      return { name, datatype, data, shape: datatype === "BYTES" ? [data.length] : [1, ...dims.map((n) => n < 0 ? data.length / known : n)] };
    });
    const began = performance.now(), lines = [];
    for await (const answer of answers(inputs)) {
      lines.push(...answer.outputs.map((output) => `${output.name} ${output.datatype} [${output.shape}] ${JSON.stringify(output.data.slice(0, 40)).slice(0, 600)}`));
      $("answer").textContent = [...lines, `${ms((performance.now() - began) / 1e3)}, version ${answer.model_version}`].join("\n");
    }
  } catch (error) { $("answer").textContent = error.message; }
});

// A digit is drawn on 32 x 32 points; the model's 8 x 8 pixels count the points of each block of 4 x 4, as those it learned from.
const canvas = $("canvas"), ink = new Uint8Array(1024);
let from = null, cell = [0, 0], asked = 0;

function paint() {
  const context = canvas.getContext("2d"), side = canvas.width / 32, style = getComputedStyle(canvas);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = style.color;
  for (let i = 0; i < 1024; i++) if (ink[i]) context.fillRect(i % 32 * side, Math.floor(i / 32) * side, side, side);
  if (document.activeElement === canvas && canvas.matches(":focus-visible")) {
    context.strokeStyle = style.outlineColor;
    context.lineWidth = 2;
    context.strokeRect(cell[0] * 4 * side + 1, cell[1] * 4 * side + 1, 4 * side - 2, 4 * side - 2);
  }
}

function dab(x, y) {
  for (let dy = -2; dy <= 2; dy++) for (let dx = -2; dx <= 2; dx++) {
    const px = Math.round(x + dx), py = Math.round(y + dy);
    if (dx * dx + dy * dy <= 5 && px >= 0 && py >= 0 && px < 32 && py < 32) ink[32 * py + px] = 1;
  }
}

function stroke(event) {
  const box = canvas.getBoundingClientRect();
  const to = [32 * (event.clientX - box.left) / box.width - 0.5, 32 * (event.clientY - box.top) / box.height - 0.5];
  const start = from || to, steps = Math.ceil(Math.hypot(to[0] - start[0], to[1] - start[1])) || 1;
  for (let i = 0; i <= steps; i++) dab(start[0] + (to[0] - start[0]) * i / steps, start[1] + (to[1] - start[1]) * i / steps);
  from = to;
  paint();
  read();
}

// The pixels of the drawing, enlarged to fill the field.
function pixels() {
  const xs = [], ys = [];
  ink.forEach((on, i) => { if (on) { xs.push(i % 32); ys.push(Math.floor(i / 32)); } });
  const found = Array(64).fill(0);
  if (!xs.length) return found;
  const left = Math.min(...xs), top = Math.min(...ys), width = Math.max(...xs) - left + 1, height = Math.max(...ys) - top + 1;
  const scale = 32 / Math.max(width, height, 12), x0 = (32 - width * scale) / 2, y0 = (32 - height * scale) / 2;
  for (let y = 0; y < 32; y++) for (let x = 0; x < 32; x++) {
    const sx = Math.floor((x - x0) / scale), sy = Math.floor((y - y0) / scale);
    if (sx >= 0 && sy >= 0 && sx < width && sy < height && ink[32 * (sy + top) + sx + left]) found[8 * (y >> 2) + (x >> 2)]++;
  }
  return found;
}

async function read() {
  const turn = ++asked, data = pixels();
  if (!data.some((x) => x)) { $("digit").replaceChildren(); $("probabilities").replaceChildren(); return; }
  try {
    const [answer, seconds] = await infer([{ name: last.models[model].inputs[0].name, datatype: "FP32", shape: [1, 64], data }]);
    if (turn !== asked) return;
    const output = Object.fromEntries(answer.outputs.map((x) => [x.name, x.data]));
    const digit = output.digit[0], p = output.probabilities;
    $("digit").replaceChildren(String(digit), " ", make("small", {}, `${(100 * p[digit]).toFixed(0)} %, ${ms(seconds)}`));
    $("probabilities").replaceChildren(...p.map((x, i) => {
      const bar = make("i");
      bar.style.height = `${Math.max(1, 80 * x)}%`;
      return make("span", { "aria-hidden": "true" }, bar, String(i));
    }));
  } catch (error) { $("digit").replaceChildren(make("small", {}, error.message)); }
}

canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); from = null; stroke(event); });
canvas.addEventListener("pointermove", (event) => { if (event.buttons) stroke(event); });
canvas.addEventListener("focus", paint);
canvas.addEventListener("blur", paint);
canvas.addEventListener("keydown", (event) => {
  const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] || [0, 0];
  if (event.key === "Delete" || event.key === "Backspace") ink.fill(0);
  else if (event.key === " ") {
    const on = !ink[32 * (4 * cell[1] + 1) + 4 * cell[0] + 1];
    for (let y = 0; y < 4; y++) for (let x = 0; x < 4; x++) ink[32 * (4 * cell[1] + y) + 4 * cell[0] + x] = on;
  } else if (dx || dy) cell = [Math.min(7, Math.max(0, cell[0] + dx)), Math.min(7, Math.max(0, cell[1] + dy))];
  else return;
  event.preventDefault();
  paint();
  if (!dx && !dy) read();
});
$("clear").addEventListener("click", () => { ink.fill(0); paint(); read(); });

$("hold").addEventListener("click", () => hold(!held));
$("batches").addEventListener("keydown", (event) => {
  const ids = [...$("batches").children].map((bar) => Number(bar.id.slice(1))).filter(Boolean);
  const at = ids.indexOf(chosen), to = { ArrowLeft: at < 0 ? ids.length - 1 : at - 1, ArrowRight: at + 1, Home: 0, End: ids.length - 1 }[event.key];
  if (event.key === "Escape") hold(false);
  else if (to === undefined || !(to in ids)) return;
  else pick(ids[to]);
  event.preventDefault();
});
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value;
  $("login").hidden = true;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
paint();
poll();
