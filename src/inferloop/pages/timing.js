"use strict";
(function () {
  const root = document.getElementById("timing-simulator");
  if (!root) return;
  const told = JSON.parse(document.getElementById("timing-streams").textContent);
  const STALL_MS = told.stall_ms;
  const SYNTHETIC = "synthetic";
  const TICK_MS = 16;
  const SETTLED_MS = 700;
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  const WORDS = ("the of and to in a is that for it as was with be by on not he his but at are this have from or had " +
    "an they which one you were all her she there would their we him been has when who will no more if out so what up " +
    "said its about than into them can only other time new some could these two may first then do any like my now over").split(" ");
  const at = (name) => root.querySelector(`[data-control="${name}"]`);

  // What a reader gets of a stream. A stream is a list of [arrival in ms after the send, tokens].

  /** The same numbers for the same seed everywhere (mulberry32, public domain). */
  function uniform(seed) {
    let state = seed >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), state | 1);
      t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  }

  /** Gaps are lognormal with the given mean and coefficient of variation; a gap may hide a stall, a chunk several drafts. */
  function synthesize(o) {
    const draw = uniform(o.seed);
    const sigma = Math.sqrt(Math.log(1 + o.cv * o.cv));
    const gap = () => {
      const normal = Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());
      const base = o.gap * Math.exp(sigma * normal - (sigma * sigma) / 2);
      return base + (draw() < o.stall_share / 100 ? o.stall : 0);
    };
    const chunks = [];
    let now = o.ttft, left = o.tokens;
    while (left > 0) {
      let held = 1;
      while (held <= o.drafts && draw() < o.acceptance / 100) held += 1;
      held = Math.min(held, left);
      chunks.push([now, held]);
      left -= held;
      now += gap();
    }
    return chunks;
  }

  /** When each token is shown if the page holds the first one back for `buffer` ms and then keeps the stream's own mean pace. */
  function playout(chunks, buffer) {
    const arrivals = chunks.flatMap(([t, n]) => Array(n).fill(t));
    if (buffer <= 0 || arrivals.length < 2) return arrivals;
    const pace = (arrivals[arrivals.length - 1] - arrivals[0]) / (arrivals.length - 1);
    const shown = [arrivals[0] + buffer];
    for (let i = 1; i < arrivals.length; i += 1) shown.push(Math.max(arrivals[i], shown[i - 1] + pace));
    return shown;
  }

  /** Instants at which something new is shown, with how much. */
  function instants(shown) {
    const out = [];
    for (const t of shown) {
      if (out.length && out[out.length - 1][0] === t) out[out.length - 1][1] += 1;
      else out.push([t, 1]);
    }
    return out;
  }

  function figures(shown, rate) {
    const steps = instants(shown);
    const gaps = steps.slice(1).map(([t], i) => t - steps[i][0]);
    const stalls = steps.slice(1).filter(([t], i) => t - steps[i][0] > STALL_MS).map(([t], i) => t);
    const share = gaps.length ? stalls.length / gaps.length : 0;
    let blocked = 0, until = steps.length ? steps[0][0] : 0;
    for (const [t, n] of steps) {
      blocked += Math.max(0, t - until);
      until = Math.max(until, t) + (n * 1000) / rate;
    }
    const first = shown[0] || 0, last = shown[shown.length - 1] || 0;
    const later = steps.length ? shown.length - steps[0][1] : 0;
    return {
      tokens: shown.length, first, last, tpot: later > 0 ? (last - first) / later : null, gaps: gaps.length,
      longest: gaps.length ? Math.max(...gaps) : 0, stalls: stalls.length, share, blocked,
      expected: 1 - Math.pow(1 - share, gaps.length),
    };
  }

  // The page.

  const lanes = Array.from(root.querySelectorAll("[data-lane]")).map((element) => ({ element, shown: [], done: 0 }));
  const clock = { playing: false, now: 0, before: 0, end: 0, timer: 0, settling: 0 };
  const say = (text) => { at("said").textContent = text; };
  const value = (name) => Number(at(name).value);
  const ms = (x) => `${x < 10 ? x.toFixed(1) : Math.round(x).toLocaleString("en")} ms`;
  const percent = (x) => `${Number((100 * x).toPrecision(3))} %`;

  function options() {
    const names = ["ttft", "gap", "cv", "tokens", "stall_share", "stall", "drafts", "acceptance", "seed"];
    return Object.fromEntries(names.map((name) => [name, Math.max(Number(at(name).min) || 0, value(name) || 0)]));
  }

  function streamOf(lane) {
    const chosen = lane.element.querySelector("select").value;
    return chosen === SYNTHETIC ? synthesize(options()) : told.streams[Number(chosen)].chunks;
  }

  function put(lane, name, text) {
    lane.element.querySelector(`[data-figure="${name}"]`).textContent = text;
  }

  function load() {
    const synthetic = lanes.some((lane) => lane.element.querySelector("select").value === SYNTHETIC);
    root.querySelector("fieldset").disabled = !synthetic;
    const rate = value("reading");
    for (const [name, text] of [["buffer", `${value("buffer")} ms`], ["reading", `${rate} tokens/s`]]) {
      at(`${name}-value`).textContent = text;
      at(name).setAttribute("aria-valuetext", text);
    }
    for (const lane of lanes) {
      lane.shown = playout(streamOf(lane), value("buffer"));
      lane.steps = instants(lane.shown);
      const f = figures(lane.shown, rate);
      put(lane, "first", ms(f.first));
      put(lane, "last", ms(f.last));
      put(lane, "tpot", f.tpot === null ? "–" : ms(f.tpot));
      put(lane, "longest", ms(f.longest));
      put(lane, "stalls", String(f.stalls));
      put(lane, "blocked", ms(f.blocked));
      put(lane, "probability", `1−(1−${Number(f.share.toPrecision(2))})^${f.gaps} = ${percent(f.expected)}`);
    }
    clock.end = Math.max(1, ...lanes.map((lane) => lane.shown[lane.shown.length - 1] || 0));
    lanes.forEach(draw);
    restart();
    remember();
  }

  /** Told once a setting rests, for those who do not see the figures change: a slider on its way would never stop. */
  function tellChange() {
    clearTimeout(clock.settling);
    clock.settling = setTimeout(() => say(lanes.map((lane) => {
      const figure = (name) => lane.element.querySelector(`[data-figure="${name}"]`).textContent;
      return `${lane.element.dataset.lane}: first token after ${figure("first")}, last after ${figure("last")}, ` +
        `pauses: ${figure("stalls")}.`;
    }).join(" ")), SETTLED_MS);
  }

  const NS = "http://www.w3.org/2000/svg";
  function mark(parent, name, attributes) {
    const element = document.createElementNS(NS, name);
    for (const [key, is] of Object.entries(attributes)) element.setAttribute(key, is);
    parent.append(element);
    return element;
  }

  /** Tokens shown against time, the reader's line, and a mark for every stall; both lanes on one scale. */
  function draw(lane) {
    const svg = lane.element.querySelector("svg");
    const most = Math.max(1, ...lanes.map((other) => other.shown.length));
    const x = (t) => (1000 * t) / clock.end, y = (n) => 118 - (108 * n) / most;
    svg.replaceChildren();
    let path = "M0 118", total = 0, before = null;
    for (const [t, n] of lane.steps) {
      if (before !== null && t - before > STALL_MS)
        mark(svg, "rect", { x: x(before), y: 4, width: Math.max(2, x(t) - x(before)), height: 114, class: "stall" });
      path += `H${x(t).toFixed(2)}V${y((total += n)).toFixed(2)}`;
      before = t;
    }
    if (lane.steps.length) {
      const start = lane.steps[0][0], rate = value("reading") / 1000;
      const end = Math.min(clock.end, start + total / rate);
      mark(svg, "line", { x1: x(start), y1: 118, x2: x(end), y2: y((end - start) * rate), class: "reader" });
    }
    mark(svg, "path", { d: path, class: "shown" });
    lane.head = mark(svg, "line", { x1: 0, x2: 0, y1: 0, y2: 120, class: "head" });
    const stalls = lane.element.querySelector('[data-figure="stalls"]').textContent;
    svg.setAttribute("aria-label", `${lane.shown.length} tokens shown over ${ms(clock.end)}, with ${stalls} stalls`);
  }

  function restart() {
    clock.now = 0;
    clock.before = performance.now();
    for (const lane of lanes) {
      lane.done = 0;
      lane.element.querySelector("output").textContent = "";
    }
    show();
  }

  function show() {
    at("time").textContent = `${(clock.now / 1000).toFixed(2)} s`;
    for (const lane of lanes) {
      let text = "";
      while (lane.done < lane.shown.length && lane.shown[lane.done] <= clock.now) {
        text += `${WORDS[(lane.done * 37) % WORDS.length]} `;
        lane.done += 1;
      }
      const output = lane.element.querySelector("output");
      if (text) output.append(text);
      output.scrollTop = output.scrollHeight;
      const head = (1000 * Math.min(clock.now, clock.end)) / clock.end;
      lane.head.setAttribute("x1", head);
      lane.head.setAttribute("x2", head);
      const last = lane.done ? lane.shown[lane.done - 1] : 0;
      const waits = clock.playing && lane.done > 0 && lane.done < lane.shown.length && clock.now - last > STALL_MS;
      lane.element.classList.toggle("stalled", waits);
    }
  }

  /** Time passes by a timer, not by painted frames: those stop in a hidden tab and come late on a busy machine. */
  function tick() {
    if (!clock.playing) return;
    const now = performance.now();
    clock.now = Math.min(clock.end, clock.now + (now - clock.before) * value("speed"));
    clock.before = now;
    const ended = clock.now >= clock.end;
    if (ended) play(false);
    show();
    if (ended) {
      say("Both answers are complete.");
      root.dataset.state = "done";
    }
  }

  function play(wanted) {
    if (wanted && clock.now >= clock.end) restart();
    clearInterval(clock.timer);
    clock.playing = wanted;
    clock.before = performance.now();
    at("play").textContent = wanted ? "Pause" : "Play";
    root.dataset.state = wanted ? "playing" : "paused";
    if (wanted) clock.timer = setInterval(tick, TICK_MS);
  }

  // The settings live in the address, so that what one sees can be passed on.

  const controls = Array.from(root.querySelectorAll("[data-control]")).filter((c) => "value" in c && c.name);
  function remember() {
    const changed = controls.filter((c) => c.value !== c.dataset.default).map((c) => [c.name, c.value]);
    const wanted = changed.length ? `#timing?${new URLSearchParams(changed)}` : "";
    if (wanted || location.hash.startsWith("#timing?"))
      try { history.replaceState(null, "", wanted || "#timing"); } catch { /* an address that may not change */ }
  }
  for (const c of controls) c.dataset.default = c.value;
  const [place, query] = location.hash.split("?");
  const given = new URLSearchParams(place === "#timing" ? query : "");
  for (const c of controls) if (given.has(c.name)) c.value = given.get(c.name);
  if (query && place === "#timing") document.getElementById("timing").scrollIntoView();

  for (const c of controls) c.addEventListener("input", () => { load(); tellChange(); });
  at("play").addEventListener("click", () => { play(!clock.playing); say(clock.playing ? "Playing." : "Paused."); });
  at("restart").addEventListener("click", () => { restart(); play(true); say("Playing from the start."); });
  load();
  root.hidden = false;
  root.dataset.state = "ready";
  if (given.get("play") && !still.matches) play(true);
})();
