// Course machinery. Lesson 14's picture: a text with guesses behind it, the rows of the step, the blocks, and k.
(function () {
  "use strict";
  const [HIGH, GAP, LETTER] = [24, 4, 7.6];
  const STYLES = { prompt: "plain", old: "cell", new: "held a", guess: "wish" };

  // Boxes as wide as their words, wrapped where the page is narrow. `first`: the number of the first box in the text.
  // Returns where the next line begins.
  function flow(pen, name, top, boxes, first) {
    let [x, y] = [1, top];
    boxes.forEach(([word, style], i) => {
      const wide = Math.max(14, word.length * LETTER + 8);
      if (x + wide > pen.width - 1) [x, y] = [1, y + HIGH + GAP];
      const key = `${name}-${first + i}`;
      pen.rect(key, x, y, wide, HIGH, style);
      pen.text(key, x + wide / 2, y + 16.5, word, "label mid mono" + (style === "plain" ? " muted" : ""));
      x += wide + GAP;
    });
    return y + HIGH + GAP;
  }

  // A column for each row of the step: the token it was fed above, the token it chose below.
  function rows(pen, frame, top) {
    const perLine = Math.max(3, Math.floor((pen.width - 2) / 74));
    const pitch = Math.min(80, (pen.width - 2) / perLine);
    const verified = frame.chosen.length > 0;
    frame.fed.forEach((word, i) => {
      const [x, y] = [1 + (i % perLine) * pitch, top + Math.floor(i / perLine) * 62];
      const wide = pitch - 6;
      const stands = i < frame.stand;
      const style = i === 0 ? "cell" : !verified ? "wish" : stands ? "held a" : "free";
      pen.rect("fed-" + i, x, y, wide, HIGH, style);
      if (style === "free") pen.texture("fed-gone-" + i, x, y, wide, HIGH, "strokes");
      pen.text("fed-" + i, x + wide / 2, y + 16.5, word, "label mid mono" + (verified && !stands ? " muted" : ""));
      if (!verified) return;
      pen.rect("chosen-" + i, x, y + HIGH + 4, wide, HIGH, stands ? "held a" : "free");
      pen.text("chosen-" + i, x + wide / 2, y + HIGH + 20.5, frame.chosen[i], "label mid mono" + (stands ? "" : " muted"));
    });
    return top + 62 * Math.max(1, Math.ceil(frame.fed.length / perLine));
  }

  function blocks(pen, frame, scene, top) {
    const [slot, between] = [9, 12];
    const wide = scene.block_size * (slot + 2) + between;
    const perLine = Math.max(1, Math.floor(pen.width / wide));
    const first = frame.num_blocks - frame.blocks.length;
    frame.blocks.forEach(([kept, used], i) => {
      const [x, y] = [1 + (i % perLine) * wide, top + Math.floor(i / perLine) * 26];
      for (let at = 0; at < scene.block_size; at++) {
        const style = at < kept ? "held a" : at < used ? "wish" : "free";
        pen.rect(`slot-${first + i}-${at}`, x + at * (slot + 2), y, slot, 18, style);
      }
    });
    return top + 26 * Math.max(1, Math.ceil(frame.blocks.length / perLine));
  }

  window.KvPlayer.views.guesses = function (pen, frame, scene) {
    pen.text("act", 0, 14, frame.act, "strong");
    const without = `${frame.tokens} ${frame.tokens === 1 ? "token" : "tokens"} in ${frame.steps} ${frame.steps === 1 ? "step" : "steps"}`;
    const pause = frame.pause ? `, pause of ${frame.pause}` : "";
    pen.text("count", 0, 34, `${without} · k = ${frame.k}${pause}`, "label num");
    const before = frame.hidden ? [[`… ${frame.hidden} more`, "plain"]] : [];
    let y = flow(pen, "word", 44, [...before, ...frame.text.map(([word, kind]) => [word, STYLES[kind]])], frame.hidden - before.length) + 14;
    pen.text("rows", 0, y, "rows of this step: fed, and below what each chose", "label muted");
    y = rows(pen, frame, y + 8) + 12;
    const shown = frame.blocks.length < frame.num_blocks ? `, of which the last ${frame.blocks.length}` : "";
    pen.text("blocks", 0, y, `${frame.num_blocks} blocks${shown}: a slot for each token`, "label muted num");
    y = blocks(pen, frame, scene, y + 8) + 6;
    pen.height = pen.legend(y, [
      ["prompt", (x, top, key) => pen.rect(key, x, top, 20, 16, "plain")],
      ["answer", (x, top, key) => pen.rect(key, x, top, 20, 16, "cell")],
      ["gained in this step", (x, top, key) => pen.rect(key, x, top, 20, 16, "held a")],
      ["guessed", (x, top, key) => pen.rect(key, x, top, 20, 16, "wish")],
      ["rejected", (x, top, key) => (pen.rect(key, x, top, 20, 16, "free"), pen.texture(key, x, top, 20, 16, "strokes"))],
    ]);
  };
})();
