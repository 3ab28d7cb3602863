// Course machinery. Lesson 5's picture: who computed what in which step, and the tokens and blocks of each.
(function () {
  "use strict";
  const ROW = 33;
  const UNIT = 6; // a token or a block in the bars below

  function cell(pen, key, letter, cell, x, y, wide, high = ROW - 8) {
    const middle = x + wide / 2;
    if (cell.kind === "waits") return pen.path(key, x + 3, y + high / 2, `M0 0H${wide - 6}`, "wait " + letter);
    if (cell.kind === "decode") {
      pen.add("circle", key, middle, y + high / 2, { class: "disc " + letter, r: 6 });
      return;
    }
    if (cell.kind === "out" || cell.kind === "aborted") {
      pen.texture(key + "-strokes", x + 1, y, wide - 2, high, "strokes");
      pen.rect(key, x + 1, y, wide - 2, high, "wish");
      pen.text(key, middle, y + high / 2 + 4.5, "×", "mid strong accent");
      return;
    }
    pen.rect(key, x + 1, y, wide - 2, high, "held " + letter);
    if (cell.kind === "again") pen.texture(key + "-strokes", x + 1, y, wide - 2, high, "strokes");
    if (cell.kind === "again") pen.rect(key + "-plate", middle - 6, y + 2, 12, high - 4, "tint " + letter);
    pen.text(key, middle, y + high / 2 + 4.5, cell.stop - cell.start, "mid strong num");
  }

  // A column of small boxes, one for each token or block, from the bottom up.
  function stack(pen, key, counts, most, x, y, wide) {
    let level = 0;
    for (const [name, count] of counts) {
      if (!count) continue;
      pen.rect(`${key}-${name}`, x + 2, y - (level + count) * UNIT, wide - 4, count * UNIT - 1, "held " + name.toLowerCase());
      level += count;
    }
    pen.path(key + "-most", x, y - most * UNIT, `M0 0H${wide}`, "limit");
  }

  window.KvPlayer.views.timeline = function (pen, frame, scene, frames, index) {
    const { jobs, budget, blocks } = scene;
    const roomy = pen.width >= 560;
    const left = roomy ? 96 : 54;
    const columns = roomy ? Math.min(frames.length, 24) : 11;
    const wide = (pen.width - left - 2) / columns;
    const first = Math.max(0, Math.min(index - columns + 2, frames.length - columns));
    const top = 24;
    pen.text("step", left - 10, 13, "step", "label muted end");
    const low = top + jobs.length * ROW;
    pen.rect("now", left + (index - first) * wide, 0, wide, low + (budget + blocks) * UNIT + 37, "now");
    jobs.forEach((job, i) => {
      const y = top + i * ROW;
      pen.badge("job-" + job.name, 12, y + 13, job.name);
      if (roomy) pen.text("job-" + job.name + "-size", 30, y + 17.5, `${job.prompt} + ${job.answer}`, "label muted num");
    });
    const [tokens, pool] = [low + budget * UNIT + 14, low + (budget + blocks) * UNIT + 34];
    pen.text("tokens", left - 10, tokens - (budget * UNIT) / 2 + 4, roomy ? "tokens" : "tok.", "label muted end");
    pen.text("tokens-most", left - 10, tokens - budget * UNIT + 4, budget, "small muted end num");
    pen.text("blocks", left - 10, pool - (blocks * UNIT) / 2 + 4, roomy ? "blocks held" : "blocks", "label muted end");
    pen.text("blocks-most", left - 10, pool - blocks * UNIT + 4, blocks, "small muted end num");
    for (let step = first; step <= Math.min(index, first + columns - 1); step++) {
      const x = left + (step - first) * wide;
      const { cells, held } = frames[step];
      pen.text("step-" + step, x + wide / 2, 13, step, "label mid num" + (step === index ? " strong" : " muted"));
      jobs.forEach((job, i) => {
        if (cells[job.name]) cell(pen, `${step}-${job.name}`, job.name.toLowerCase(), cells[job.name], x, top + i * ROW, wide);
      });
      stack(pen, "tokens-" + step, jobs.map(({ name }) => [name, cells[name] && cells[name].stop ? cells[name].stop - cells[name].start : 0]), budget, x, tokens, wide);
      stack(pen, "blocks-" + step, jobs.map(({ name }) => [name, held[name] || 0]), blocks, x, pool, wide);
    }
    const sign = (what) => (x, y, key) => cell(pen, key, "a", what, x, y, 22, 16);
    pen.height = pen.legend(pool + 14, [
      ["prompt, a chunk", sign({ kind: "prefill", start: 0, stop: 6 })],
      ["decode, one token", sign({ kind: "decode" })],
      ["waits", sign({ kind: "waits" })],
      ["preempted or aborted", sign({ kind: "out" })],
      ["computed again", sign({ kind: "again", start: 0, stop: 6 })],
    ]);
  };
})();
