// Course machinery. Lesson 0's picture: the rows that each step computes, without a cache and with K and V kept.
(function () {
  "use strict";
  const LETTERS = 7.1; // about a letter's width at 13px

  // The text so far: the prompt, and what was chosen. Room for all of it, so that nothing below moves.
  function text(pen, frame, all) {
    let [x, y] = [1, 1];
    all.forEach((word, i) => {
      const wide = Math.max(22, word.length * LETTERS + 8);
      if (x + wide > pen.width - 1) [x, y] = [1, y + 27];
      const chosen = i - frame.prompt.length;
      if (chosen < frame.answer.length) {
        pen.rect("word-" + i, x, y, wide, 22, chosen === frame.answer.length - 1 ? "wish" : "cell a");
        pen.text("word-" + i, x + wide / 2, y + 15.5, word, "mid");
      }
      x += wide + 4;
    });
    return y + 34;
  }

  function box(pen, key, kind, x, y, wide, high) {
    pen.rect(key, x, y, wide, high, kind === "kept" ? "cell a" : "held a").attrs.rx = Math.min(4, wide / 5);
    if (kind === "again") pen.texture(key + "-again", x, y, wide, high, "strokes").attrs.rx = Math.min(4, wide / 5);
  }

  // One run: a line for each step, a column for each position, and below it all rows computed so far, end to end.
  function panel(pen, run, frame, scene, x, y, room, positions) {
    const left = x + 20;
    const pitch = Math.min(20, (room - 20) / positions);
    const row = Math.max(13, Math.min(17, pitch));
    const gap = pitch > 12 ? 2 : 1;
    const [total, again] = [frame.counts[run], frame.again[run]];
    const foot = room < 150 ? x : left; // the words below the bar need all of a narrow half
    pen.text("name-" + run, x, y + 12, scene.names[run], "strong");
    frame.spans[run].forEach(([start, stop], i) => {
      const top = y + 22 + i * row;
      const now = i === frame.spans[run].length - 1;
      const known = i ? frame.spans[run][i - 1][1] : 0;
      pen.text(`step-${run}-${i}`, left - 5, top + row - 4, i + 1, "small end num" + (now ? " strong" : " muted"));
      for (let at = 0; at < stop; at++) {
        const kind = at < start ? "kept" : at < known ? "again" : "new";
        box(pen, `box-${run}-${i}-${at}`, kind, left + at * pitch, top, pitch - gap, row - 2);
      }
    });
    const [below, unit] = [y + 30 + scene.steps * row, (positions * pitch - gap) / scene.most];
    pen.rect("sum-" + run, left, below, Math.max(1, total * unit), 14, "held a");
    if (again) pen.texture("again-" + run, left, below, again * unit, 14, "strokes");
    pen.text("count-" + run, foot, below + 31, `${total} rows computed`, "strong num");
    pen.text("count-again-" + run, foot, below + 48, `${again} of them again`, "label muted num");
    return below + 58;
  }

  window.KvPlayer.views.work = function (pen, frame, scene, frames) {
    const last = frames[frames.length - 1];
    const positions = Math.max(1, ...last.spans.flat(2));
    const between = pen.width >= 560 ? 24 : 10;
    const half = (pen.width - between) / 2;
    const y = text(pen, frame, [...last.prompt, ...last.answer]);
    const sized = { ...scene, most: Math.max(1, ...last.counts) };
    panel(pen, 0, frame, sized, 0, y, half, positions);
    const low = panel(pen, 1, frame, sized, half + between, y, half, positions);
    const sign = (kind) => (x, top, key) => box(pen, key, kind, x, top, 20, 16);
    pen.height = pen.legend(low + 4, [
      ["computed", sign("new")],
      ["computed again", sign("again")],
      ["read from the cache", sign("kept")],
    ]);
  };
})();
