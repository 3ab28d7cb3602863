/* Lesson 11's tool: what a checkpoint interval costs in memory and saves in tokens, for one stored prompt. */
(function () {
  "use strict";
  const BLOCK = 16;
  const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

  // Where a prompt leaves checkpoints: every interval, and at its last whole block before its last token.
  function places({ tokens, every }) {
    const found = [];
    for (let at = every; at <= tokens; at += every) found.push(at);
    const last = Math.floor((tokens - 1) / BLOCK) * BLOCK;
    return last > 0 && !found.includes(last) ? [...found, last].sort((one, other) => one - other) : found;
  }

  // A second prompt, longer than `shared` tokens, begins with that many of the first.
  function work(values) {
    const kept = places(values);
    const stored = Math.floor(Math.min(values.shared, values.tokens) / BLOCK) * BLOCK;
    const start = Math.max(0, ...kept.filter((at) => at <= stored));
    return { checkpoints: kept.length, places: kept, stored, start, again: Math.min(values.shared, values.tokens) - start };
  }

  function draw({ tokens, shared }, { places: kept, start }, wide) {
    const x = (at) => (8 + ((wide - 16) * at) / tokens).toFixed(1);
    const common = Math.min(shared, tokens);
    const dots = kept.length <= 160 ? kept.map((at) => `<circle cx="${x(at)}" cy="44" r="${kept.length > 60 ? 2.5 : 4.5}"/>`).join("") : `<rect class="many" x="8" y="40" width="${wide - 16}" height="8"/>`;
    return `<svg viewBox="0 0 ${wide} 88" aria-hidden="true"><text class="axis" x="8" y="14">checkpoints along the stored prompt</text>
      <path class="thin" d="M8 44H${wide - 8}"/><path d="M${x(start)} 62H${x(common)}"/>${dots}<path class="thin" d="M${x(common)} 30V68"/>
      <text class="${common > tokens / 2 ? "end" : "axis"}" x="${x(common)}" y="84">the second prompt parts here</text></svg>`;
  }

  window.KvTools = Object.assign(window.KvTools || {}, {
    interval: {
      title: "How often is a state worth keeping?",
      fields: [
        { key: "every", label: "checkpoint every", value: 10, log: 1, min: 4, max: 13, unit: "" },
        { key: "tokens", label: "stored prompt, tokens", value: 6000, min: 1 },
        { key: "shared", label: "shared with the second", value: 4500, min: 0 },
        { key: "state", label: "a state, MiB", value: 21.7, min: 0, step: "any" },
        { key: "kv", label: "KV of a token, KiB", value: 28, min: 0, step: "any" },
      ],
      work,
      say({ checkpoints, stored, start, again }, { tokens, shared, state, kv }) {
        return [
          ["checkpoints of this prompt", `${number(checkpoints)}: ${number(checkpoints * state)} MiB`],
          ["its K and V beside them", `${number((tokens * kv) / 1024)} MiB`],
          ["the second prompt starts from", start ? `token ${number(start)}, of ${number(stored)} with K and V` : "the beginning"],
          ["tokens computed again", `${number(again)} of ${number(Math.min(shared, tokens))}`],
        ];
      },
      draw,
    },
  });
})();
