/* Lesson 12's tool: one ladder of speed. A tier above the line gives K and V back sooner than the engine computes them. */
(function () {
  "use strict";
  const KIB = 1024;
  const MEASURED = [["our disk", 182], ["our host memory", 2976]]; // MB/s: bench.py tiers --parts line, at 52 tokens/s
  const [SLOWEST, FASTEST] = [1, 100_000]; // MB/s, the ends of the ladder
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
  const short = (value) => (value >= 100 ? number(value) : value.toLocaleString("en", { maximumSignificantDigits: 3 }));

  // As BreakEven in mini_engine/tiers/break_even.py
  function work({ rate, token, bandwidth, latency, prefix }) {
    const gain = 1 / rate - (token * KIB) / (bandwidth * 1e6);
    const again = prefix / rate;
    const back = latency / 1e3 + (prefix * token * KIB) / (bandwidth * 1e6);
    return { from: gain > 0 ? latency / 1e3 / gain : Infinity, again, back, least: (token * KIB * rate) / 1e6 };
  }

  function draw({ bandwidth }, { least }) {
    const wide = window.KvWide();
    const share = (speed) => Math.log(speed / SLOWEST) / Math.log(FASTEST / SLOWEST);
    const x = (speed) => 8 + (wide - 16) * Math.min(1, Math.max(0, share(speed)));
    const ticks = [1, 10, 100, 1000, 10_000, 100_000].filter((speed) => wide > 480 || speed !== 10_000);
    const scale = ticks.map((speed, i) => `<path class="thin" d="M${x(speed)} 128v6"/><text class="${i ? (speed < FASTEST ? "" : "end") : "axis"}" x="${x(speed)}" y="150">${number(speed)}</text>`);
    const rungs = [...MEASURED, ["your tier", bandwidth]].map(([name, speed], i) => {
      const [at, top] = [x(speed), 34 + 30 * i];
      const kind = speed > least ? "wins" : "loses";
      const words = `${name}: ${short(speed)} MB/s`;
      return `<path class="thin" d="M8 ${top}H${wide - 8}"/><circle class="${kind}" ${i === MEASURED.length ? 'data-key="bandwidth" r="9"' : 'r="6"'} cx="${at}" cy="${top}"/>
        <text class="${at > wide / 2 ? "end" : "axis"}" x="${at > wide / 2 ? at - 12 : at + 12}" y="${top - 5}">${words}</text>`;
    });
    const line = x(least);
    return `<svg class="wide" viewBox="0 0 ${wide} 172" aria-hidden="true"><rect class="gain" x="${line}" y="20" width="${Math.max(0, wide - 8 - line)}" height="108"/>
      <path class="even" d="M${line} 14V128"/><circle class="grip" data-key="rate" cx="${line}" cy="116" r="9"/><text class="${line > wide / 2 ? "end" : "axis"} strong" x="${line}" y="11">break-even: ${short(least)} MB/s</text>
      ${rungs.join("")}<path class="thin" d="M8 128H${wide - 8}"/>${scale.join("")}<text x="${wide / 2}" y="168">MB/s of K and V; right of the line bringing back wins</text></svg>`;
  }

  const speedAt = (x, wide) => SLOWEST * (FASTEST / SLOWEST) ** ((x - 8) / (wide - 16));

  window.KvTools = Object.assign(window.KvTools || {}, {
    "break-even": {
      title: "One ladder of speed: copy back, or compute again? Drag the line, or your tier.",
      fields: [
        { key: "rate", label: "prefill", value: Math.log2(52), log: 0.1, min: Math.log2(52) - 4, max: Math.log2(52) + 10, unit: "tokens/s" },
        { key: "bandwidth", label: "your tier", value: Math.log2(500), log: 0.1, min: Math.log2(500) - 8.5, max: Math.log2(500) + 7, unit: "MB/s" },
        { key: "token", label: "KV of a token, KiB", value: 112, min: 1, step: "any" },
        { key: "latency", label: "latency, ms", value: 5, min: 0, step: "any" },
        { key: "prefix", label: "tokens of the prefix", value: 1000, min: 1 },
      ],
      work,
      say: ({ from, again, back }) => [
        ["compute again", `${short(again * 1e3)} ms`],
        ["bring back", `${short(back * 1e3)} ms: ${back < again ? `${short(again / back)} times as fast` : "slower"}`],
        ["it pays from", from === Infinity ? "no length: the tier is too slow" : Math.ceil(from) === 1 ? "1 token" : `${number(Math.ceil(from))} tokens`],
      ],
      draw,
      drag: {
        bandwidth: (x, _, wide) => speedAt(x, wide),
        rate: (x, { token }, wide) => (speedAt(x, wide) * 1e6) / (token * KIB),
      },
    },
  });
})();
