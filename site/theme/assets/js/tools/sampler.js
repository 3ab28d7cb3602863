/* Lesson 4's tool: temperature and the three filters over one recorded row of logits, as mini_engine/engine/sampler.py
   applies them, in the same order. */
(function () {
  "use strict";
  const DATA = window.KvToolData_sampler;
  const NEVER = -Infinity;
  const escape = (text) => text.replace(/[&<>]/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[char]);

  function softmax(logits) {
    const best = Math.max(...logits);
    const parts = logits.map((logit) => Math.exp(logit - best));
    const sum = parts.reduce((total, part) => total + part, 0);
    return parts.map((part) => part / sum);
  }

  // The best `count` tokens, and any that tie with the last of them.
  function keepTopK(logits, count) {
    const last = [...logits].sort((one, other) => other - one)[Math.min(count, logits.length) - 1];
    return logits.map((logit) => (logit < last ? NEVER : logit));
  }

  // From the worst token up: one is removed if it and all worse ones together make up at most 1 - p.
  function keepTopP(logits, p) {
    const probs = softmax(logits);
    const order = logits.map((_, token) => token).sort((one, other) => logits[one] - logits[other]);
    const kept = [...logits];
    let tail = 0;
    for (const token of order.slice(0, -1)) if ((tail += probs[token]) <= 1 - p) kept[token] = NEVER;
    return kept;
  }

  function keepMinP(logits, share) {
    const probs = softmax(logits);
    const least = share * Math.max(...probs);
    return logits.map((logit, token) => (probs[token] < least ? NEVER : logit));
  }

  function process({ temperature, topK, topP, minP }) {
    let logits = DATA.logits;
    if (temperature === 0) return keepTopK(logits, 1);
    if (temperature !== 1) logits = logits.map((logit) => logit / temperature);
    if (topK > 0) logits = keepTopK(logits, topK);
    if (topP < 1) logits = keepTopP(logits, topP);
    return minP > 0 ? keepMinP(logits, minP) : logits;
  }

  function draw(values, { probs }, wide) {
    const [left, row, room] = [92, 21, wide - 162];
    const most = Math.max(...DATA.words.map(([token]) => probs[token]));
    const lines = DATA.words.map(([token, word], i) => {
      const [prob, y] = [probs[token], i * row];
      const gone = prob === 0;
      const bar = gone ? "" : `<rect x="${left}" y="${y + 3}" width="${Math.max(1.5, (prob / most) * room).toFixed(1)}" height="${row - 6}" rx="3"/>`;
      return `<g class="${gone ? "gone" : ""}"><text class="end" x="${left - 8}" y="${y + 15}">${escape(word)}</text>${bar}<text class="end" x="${wide}" y="${y + 15}">${gone ? "cut" : prob.toFixed(3)}</text></g>`;
    });
    return `<svg viewBox="0 0 ${wide} ${DATA.words.length * row}" aria-hidden="true">${lines.join("")}</svg>`;
  }

  const off = (value, neutral) => (value === neutral ? "off" : String(value));
  window.KvTools = Object.assign(window.KvTools || {}, {
    sampler: {
      title: `What can be drawn after “${DATA.prompt}”?`,
      fields: [
        { key: "temperature", label: "temperature", value: 1, slide: 0.05, max: 2, show: (value) => (value ? value.toFixed(2) : "0, greedy") },
        { key: "topK", label: "top-k", value: 0, slide: 1, max: 40, show: (value) => off(value, 0) },
        { key: "topP", label: "top-p", value: 1, slide: 0.05, min: 0.05, max: 1, show: (value) => off(value, 1) },
        { key: "minP", label: "min-p", value: 0, slide: 0.05, max: 1, show: (value) => off(value, 0) },
      ],
      work(values) {
        const logits = process(values);
        return { probs: softmax(logits), kept: logits.filter((logit) => logit > NEVER).length };
      },
      say({ probs, kept }) {
        const shown = DATA.words.reduce((sum, [token]) => sum + probs[token], 0);
        const [best, word] = DATA.words[0];
        return [
          ["tokens that can be drawn", `${kept.toLocaleString("en")} of ${DATA.logits.length.toLocaleString("en")}`],
          ["the likeliest", `“${word}”, ${probs[best].toFixed(3)}`],
          [`all but the ${DATA.words.length} shown`, Math.max(0, 1 - shown).toFixed(3)],
        ];
      },
      draw,
    },
  });
})();
