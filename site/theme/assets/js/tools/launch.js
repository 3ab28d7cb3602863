/* Lesson 10's tool: a decode step three ways, as a player. On paper: every number comes from the sliders, none from a GPU. */
(function () {
  "use strict";
  const PLAN = 0.15; // ms of the host's work around a step: what a replayed step takes, bench.py launch
  const BARS = 24; // a bar stands for many kernels
  const DEVICE = "device loop";
  const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

  // All in ms. A kernel begins once it has been launched and the one before it has ended.
  function work({ launch, kernels, gpu }) {
    const [call, kernel] = [launch / 1e3, gpu / kernels];
    const issued = PLAN + kernels * call;
    const plain = Math.max(issued + kernel, PLAN + call + gpu);
    const replayed = PLAN + call + gpu;
    return { plain, replayed, loop: Math.max(call, gpu), idle: 1 - gpu / plain, issued, call, kernel };
  }

  const spanOf = (plain, replayed) => 1.02 * Math.max(plain, replayed);

  function done(shown, length) {
    const steps = Math.floor(shown / length + 1e-9);
    return steps === 1 ? "1 step" : `${steps} steps`;
  }

  // One step's bars: [lane, begin, end, look] with lane 0 the host's and lane 1 the GPU's.
  function plainStep({ call, kernel, plain }, { kernels }) {
    const bars = [[0, 0, PLAN, "plan"]];
    const group = kernels / BARS;
    let free = 0;
    for (let i = 0; i < BARS; i++) {
      const begin = PLAN + i * group * call;
      bars.push([0, begin, begin + group * call, "call"]);
      const starts = Math.max(begin + call, free);
      const busy = call > kernel ? group * call * (kernel / call) : group * kernel;
      bars.push([1, starts, starts + busy, "kernel"]);
      free = starts + busy;
    }
    return { bars, length: plain };
  }

  const replayedStep = ({ call, replayed }, { gpu }) => ({
    bars: [[0, 0, PLAN, "plan"], [0, PLAN, PLAN + call, "call"], [1, PLAN + call, PLAN + call + gpu, "kernel"]],
    length: replayed,
  });

  const loopStep = ({ call, loop }, { gpu }) => ({ bars: [[0, 0, call, "call"], [1, Math.max(0, loop - gpu), loop, "kernel"]], length: loop });

  function row(name, step, top, span, shown, wide) {
    const [left, right] = [44, wide - 8];
    const x = (time) => left + ((right - left) * Math.min(time, span)) / span;
    const bars = [];
    for (let begin = 0, i = 0; begin < span && i < 400; begin += step.length, i++) {
      for (const [lane, from, to, look] of step.bars) {
        const [start, end] = [x(begin + from), x(Math.min(begin + to, shown))];
        if (begin + from < shown && begin + from < span) bars.push(`<rect class="${look}" x="${start.toFixed(1)}" y="${top + 10 + 20 * lane}" width="${Math.max(0.6, end - start - 0.5).toFixed(1)}" height="14"/>`);
      }
    }
    return `<text class="axis strong" x="${left}" y="${top + 2}">${name}</text><text class="end" x="${right}" y="${top + 2}">${done(shown, step.length)} done</text>
      <text class="axis" x="2" y="${top + 21}">host</text><text class="axis" x="2" y="${top + 41}">GPU</text><path class="thin" d="M${left} ${top + 25}H${right}M${left} ${top + 45}H${right}"/>${bars.join("")}`;
  }

  function draw(values, made) {
    const wide = window.KvWide();
    const span = spanOf(made.plain, made.replayed);
    const shown = (span * values.time) / 100;
    const rows = [["plain", plainStep], ["replayed", replayedStep], [DEVICE, loopStep]];
    const parts = rows.map(([name, step], i) => row(name, step(made, values), 16 + 56 * i, span, shown, wide));
    const at = 44 + ((wide - 52) * values.time) / 100;
    return `<svg class="wide" viewBox="0 0 ${wide} 204" aria-hidden="true">${parts.join("")}<path class="even" d="M${at} 20V180"/>
      <text class="axis" x="44" y="198">0</text><text class="end" x="${wide - 8}" y="198">${short(span)} ms</text></svg>`;
  }

  // A button that plays: the slider of time runs from its beginning to its end in four seconds.
  function playButton(slider) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "kv-button";
    button.textContent = "Play";
    button.addEventListener("click", function () {
      const began = performance.now();
      function frame(now) {
        slider.value = Math.min(100, Math.max(0, (now - began) / 40));
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        if (now - began < 4000) requestAnimationFrame(frame);
      }
      requestAnimationFrame(frame);
    });
    return button;
  }

  window.KvTools = Object.assign(window.KvTools || {}, {
    launch: {
      title: "One decode step, three ways. On paper: no GPU has run it",
      fields: [
        { key: "time", label: "time", value: 100, slide: 1, max: 100, show: (part) => `${part} %` },
        { key: "launch", label: "a launch takes", value: Math.log2(3), log: 0.1, min: Math.log2(3) - 5, max: Math.log2(3) + 3, unit: "µs" },
        { key: "kernels", label: "kernels in a step", value: 1379, min: BARS },
        { key: "gpu", label: "GPU's work, ms", value: 0.6, min: 0.01, step: "any" },
      ],
      work,
      say: ({ plain, replayed, loop, idle }, { time }) => [
        ["steps done by then", [plain, replayed, loop].map((step) => done((spanOf(plain, replayed) * time) / 100, step)).join(", ")],
        ["launched one by one", `${short(plain)} ms a step; the GPU idles ${Math.round(100 * idle)} % of it`],
        ["replayed with one launch", `${short(replayed)} ms: ${short(plain / replayed)} times as fast`],
        ["in the device loop", `${short(loop)} ms: ${short(plain / loop)} times as fast`],
      ],
      draw,
      first: (form) => playButton(form.elements.time),
    },
  });
})();
