// Course machinery. Lesson 17's picture: a key's numbers as bars, the levels of each group, and what they are rounded to.
(function () {
  "use strict";

  const number = (value, digits) => value.toFixed(digits).replace("-", "−");

  // A group's 16 levels as lines behind its bars.
  function levels(pen, group, [least, step], x, wide, place) {
    for (let code = 0; code < 16; code++) {
      const y = place(least + code * step);
      pen.path(`level-${group}-${code}`, x, y, `M0 0H${wide}`, "line");
    }
  }

  function scores(pen, frame, y) {
    const isNarrow = pen.width < 320;
    const rows = [
      ["full", isNarrow ? "q · k, full precision" : "q · k in full precision"],
      ["plain", isNarrow ? "key rounded" : "with the key rounded as it is"],
      ["turned", "rotated, then rounded"],
    ];
    rows.forEach(([name, words], i) => {
      const value = frame.scores[name];
      pen.text("score-name-" + name, 0, y + i * 20, words, "label muted");
      const off = name === "full" || value === null ? "" : ` (off by ${number(Math.abs(value - frame.scores.full), 2)})`;
      pen.text("score-" + name, isNarrow ? 140 : 200, y + i * 20, value === null ? "–" : number(value, 2) + off, "label num" + (value === null ? " muted" : " strong"));
    });
    return y + rows.length * 20;
  }

  window.KvPlayer.views.bits = function (pen, frame, scene, frames) {
    const count = frame.shown.length;
    const all = frames.flatMap(({ shown }) => shown);
    const [low, high] = [Math.min(0, ...all), Math.max(...all)];
    const top = pen.legend(0, [
      ["a number of the key", (x, y, key) => pen.rect(key, x + 6, y, 8, 16, "held a")],
      ["a level", (x, y, key) => pen.path(key, x, y + 8, "M0 0H20", "line")],
      ["rounded to", (x, y, key) => pen.path(key, x, y + 8, "M0 0H20", "arrow")],
    ]) + 14;
    const tall = 190;
    const left = 30;
    const groups = Math.ceil(count / scene.group);
    const gap = 10;
    const pitch = (pen.width - left - gap * (groups - 1)) / count;
    const place = (value) => top + tall * ((high - value) / (high - low));
    for (const value of [high, 0, low]) pen.text("axis-" + value, left - 6, place(value) + 4, number(value, 0), "small muted end num");
    for (let group = 0; group < groups; group++) {
      const x = left + group * (scene.group * pitch + gap);
      const wide = Math.min(scene.group, count - group * scene.group) * pitch;
      if (frame.levels.length) levels(pen, group, frame.levels[group], x, wide, place);
      pen.path("zero-" + group, x, place(0), `M0 0H${wide}`, "line");
      for (let i = group * scene.group; i < Math.min(count, (group + 1) * scene.group); i++) {
        const at = x + (i - group * scene.group) * pitch;
        const [from, to] = [place(Math.max(0, frame.shown[i])), place(Math.min(0, frame.shown[i]))];
        pen.rect("bar-" + i, at + 0.5, from, Math.max(1.5, pitch - 1.5), Math.max(1, to - from), "held a");
        if (frame.rounded) pen.path("mark-" + i, at - 0.5, place(frame.rounded[i]), `M0 0H${pitch}`, "arrow");
      }
      const step = frame.levels.length ? `step ${number(frame.levels[group][1], 2)}` : "";
      pen.text("step-" + group, x + wide / 2, top + tall + 20, `${pen.width < 320 ? "" : "numbers "}${group * scene.group} … ${Math.min(count, (group + 1) * scene.group) - 1}${step ? ": " + step : ""}`, "small mid" + (step ? "" : " muted"));
    }
    const below = scores(pen, frame, top + tall + 50);
    pen.text("bytes", 0, below, frame.bytes ? `${frame.bytes} bytes` : `${2 * count} bytes in bfloat16`, "label" + (frame.bytes ? " strong" : " muted"));
    pen.height = below + 8;
  };
})();
