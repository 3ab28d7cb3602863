// Course machinery. Lesson 3's second picture: a query's walk over its blocks, and the sums that online softmax keeps.
(function () {
  "use strict";

  const signed = (value, digits) => value.toFixed(digits).replace("-", "−");
  const clip = (word) => (word.length > 5 ? word.slice(0, 4) + "…" : word);

  // A key: its token, its score, and a bar for exp(score − largest).
  function key(pen, one, i, isNew, x, y, wide, tall) {
    const middle = x + wide / 2;
    pen.rect("key-" + i, x, y, wide, 22, one.score === null ? "empty a" : "cell a");
    pen.text("key-" + i, middle, y + 15.5, clip(one.word), "small mid");
    if (one.score === null) return;
    if (isNew) pen.rect("key-new-" + i, x - 1.5, y - 1.5, wide + 3, 25, "ring");
    pen.text("score-" + i, middle, y + 37, signed(one.score, 2), "small mid num");
    if (one.part === null) return;
    const high = Math.max(1.5, tall * one.part);
    pen.rect("part-" + i, x + 3, y + 44 + tall - high, wide - 6, high, "held a");
    pen.text("part-" + i, middle, y + 58 + tall, one.part.toFixed(2), "small mid num");
  }

  function blocks(pen, frame, scene, top) {
    const size = scene.block_size;
    const perLine = pen.width >= 560 ? frame.table.length : 2;
    const group = (pen.width + 6) / perLine;
    const tall = pen.width >= 560 ? 64 : 44; // the bar of a part of 1
    const line = 100 + tall;
    const wide = (group - 12 - 3 * (size - 1)) / size;
    frame.table.forEach((block, entry) => {
      const [x, y] = [1 + (entry % perLine) * group, top + Math.floor(entry / perLine) * line];
      const now = entry === frame.entry;
      pen.rect("block-" + entry, x + 1, y, group - 12, 22, "held a");
      pen.text("block-" + entry, x + group / 2 - 5, y + 15.5, `block ${block}`, "label mid" + (now ? " strong" : ""));
      if (now) pen.rect("at", x - 1, y - 2, group - 8, 26, "ring");
      for (let offset = 0; offset < size; offset++) {
        const [i, left] = [entry * size + offset, x + 1 + offset * (wide + 3)];
        const one = frame.keys[i];
        if (one) key(pen, one, i, one.score !== null && one.part === null, left, y + 30, wide, tall);
        else pen.rect("unwritten-" + i, left, y + 30, wide, 22, "free");
      }
    });
    const low = top + line * Math.ceil(frame.table.length / perLine);
    pen.text("meaning", 2, low + 6, "each token's score, and its part: exp(score − largest)", "small muted");
    return low + 18;
  }

  function register(pen, name, words, value, factor, x, y, wide) {
    pen.text(name, x, y + 11, words, "label muted");
    pen.rect(name, x, y + 17, wide, 26, "cell a");
    pen.text(name + "-value", x + wide / 2, y + 34.5, value, "mid strong num");
    if (factor === null) return;
    pen.rect(name + "-changed", x - 1.5, y + 15.5, wide + 3, 29, "ring");
    pen.text(name + "-factor", x + wide, y + 11, "× " + factor.toFixed(2), "label strong accent end num");
  }

  window.KvPlayer.views.walk = function (pen, frame, scene) {
    const numbers = (values) => (values ? values.map((value) => signed(value, 3)).join(" · ") : "–");
    let y = blocks(pen, frame, scene, 3) + 2;
    const roomy = pen.width >= 560;
    const short = roomy ? 130 : (pen.width - 14) / 2;
    register(pen, "largest", "largest score", frame.best === null ? "−∞" : signed(frame.best, 2), null, 2, y, short);
    register(pen, "sum", "sum of parts", frame.sum.toFixed(2), frame.factor, short + 12, y, short);
    const [x, wide] = roomy ? [2 * short + 22, pen.width - 2 * short - 24] : [2, pen.width - 4];
    if (!roomy) y += 50;
    const words = roomy ? "sum of part × value, its first three numbers" : "sum of part × value, 3 numbers";
    register(pen, "sums", words, numbers(frame.sums), frame.factor, x, y, wide);
    pen.text("out-name", 2, y + 66, roomy ? "output: sum of values / sum of parts" : "output", "label muted");
    pen.text("out", x + wide / 2, y + 66, numbers(frame.out), "mid num" + (frame.out ? " strong" : " muted"));
    pen.text("kernel-name", 2, y + 86, roomy ? "softmax over all scores at once" : "at once", "label muted");
    pen.text("kernel", x + wide / 2, y + 86, numbers(frame.kernel), "mid num" + (frame.kernel ? " strong" : " muted"));
    pen.height = y + 94;
  };
})();
