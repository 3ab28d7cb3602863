// Course machinery. Lesson 4's picture: the best tokens with logit and probability, the sampler's steps, the draw.
(function () {
  "use strict";
  const ROW = 21;

  function steps(pen, frame, scene) {
    let [x, y] = [0, 0];
    const at = scene.stages.indexOf(frame.stage);
    scene.stages.forEach((stage, i) => {
      const wide = stage.length * 6.7 + 16;
      if (x + wide > pen.width) [x, y] = [0, y + 30];
      pen.rect("stage-" + i, x, y, wide, 24, i === at ? "held a" : "free");
      pen.text("stage-" + i, x + wide / 2, y + 16.5, stage, "label mid" + (i === at ? " strong" : " muted"));
      x += wide + 6;
    });
    return y + 40;
  }

  function bars(pen, frame, top) {
    const left = 96;
    const room = pen.width - left - 100;
    const scale = Math.min(room / Math.max(...frame.rows.map((row) => row.prob), 0.05), room / 0.2);
    pen.text("head-logit", pen.width - 50, top + 11, "logit", "small muted end");
    pen.text("head-prob", pen.width, top + 11, "prob.", "small muted end");
    frame.rows.forEach((row, i) => {
      const y = top + 18 + i * ROW;
      const gone = row.logit === null;
      const mine = frame.chosen === i;
      pen.text("word-" + i, left - 10, y + 13, row.word, "end" + (gone ? " muted" : mine ? " strong" : ""));
      if (gone) pen.texture("gone-" + i, left, y + 2, 60, ROW - 8, "strokes");
      else pen.rect("bar-" + i, left, y + 2, Math.max(1.5, row.prob * scale), ROW - 6, "held " + (mine ? "b" : "a"));
      pen.text("logit-" + i, pen.width - 50, y + 13, gone ? "−∞" : row.logit.toFixed(2).replace("-", "−"), "label end num" + (gone ? " muted" : ""));
      pen.text("prob-" + i, pen.width, y + 13, row.prob.toFixed(3), "label end num" + (gone ? " muted" : ""));
    });
    const y = top + 18 + frame.rows.length * ROW;
    pen.text("rest", left, y + 14, frame.rest ? "all others together" : "all others: −∞", "label muted");
    pen.text("rest-prob", pen.width, y + 14, frame.rest.toFixed(3), "label end muted num");
    return y + 26;
  }

  // Probabilities end to end; the number falls on one of them.
  function line(pen, frame, top) {
    if (frame.stage !== "draw") return;
    let x = 0;
    const inOrder = frame.rows.map((row, i) => [row, i]).sort(([one], [other]) => one.id - other.id);
    inOrder.forEach(([row, i]) => {
      if (!row.prob) return;
      const wide = row.prob * pen.width;
      pen.rect("stretch-" + i, x + 0.5, top + 16, Math.max(1, wide - 1), 26, "held " + (frame.chosen === i ? "b" : "a"));
      if (wide > row.word.length * 7 + 6) pen.text("stretch-" + i, x + wide / 2, top + 33, row.word, "label mid" + (frame.chosen === i ? " strong" : ""));
      x += wide;
    });
    pen.text("zero", 0, top + 57, "0", "small muted");
    pen.text("one", pen.width, top + 57, "1", "small muted end");
    if (frame.u === null) return;
    const at = frame.u * pen.width;
    pen.path("needle", at, top + 4, "M0 0V44", "arrow", { from: [0, top + 4] });
    const side = at > pen.width - 60 ? " end" : "";
    pen.text("needle", at + (side ? -5 : 5), top + 11, frame.u.toFixed(3), "label strong accent num" + side, { from: [5, top + 11] });
  }

  window.KvPlayer.views.logits = function (pen, frame, scene) {
    const top = steps(pen, frame, scene);
    const below = bars(pen, frame, top);
    line(pen, frame, below + 4);
    pen.height = below + (frame.stage === "draw" ? 66 : 4);
  };
})();
