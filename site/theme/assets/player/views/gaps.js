// Course machinery. Lesson 9's second picture: the operations of decode steps on one scale of time, and a layer's parts.
(function () {
  "use strict";
  const KINDS = [["matrix products", "a"], ["norms", "b"], ["RoPE", "c"], ["write K and V", "d"], ["attention", "e"], ["other", "f"]];
  const NAMES = { reference: "lesson 0's layers", torch: "fewer, larger operations", packed: "one call" };
  const round = (value) => Math.round(value * 10) / 10;

  // All operations of a step as one shape.
  function step(pen, { name, us, count, bars }, scale, y) {
    pen.text("step-" + name, 0, y + 11, `${NAMES[name]}: ${count} operations`, "label");
    pen.text("us-" + name, pen.width, y + 11, `${Math.round(us).toLocaleString("en")} µs`, "label strong end num");
    pen.rect("well-" + name, 0, y + 18, Math.max(4, Math.min(pen.width, scale(bars[bars.length - 1][0] + bars[bars.length - 1][1]))), 22, "now");
    const shapes = bars.map(([start, took]) => `M${round(scale(start))} 0h${round(Math.max(0.4, scale(took)))}v22h-${round(Math.max(0.4, scale(took)))}z`);
    pen.path("bars-" + name, 0, y + 18, shapes.join(""), "solid a");
  }

  // A layer, wrapped into lines: operations as bars, a line's parts named below if they have room.
  function layer(pen, frame, scene, top) {
    const { parts, us } = scene.layers[frame.layer];
    const longest = Math.max(...scene.layers.map((one) => one.us));
    const lines = pen.width < 560 ? 3 : 2;
    const room = pen.width - 2;
    const scale = (time) => (time / longest) * lines * room;
    pen.text("layer", 0, top + 11, `one layer: ${parts.reduce((sum, part) => sum + part[2].length, 0)} operations in ${Math.round(us)} µs${pen.width < 320 ? "" : ", with the profiler"}`, "label muted");
    parts.forEach(([name, kind, bars], i) => {
      const faded = frame.lit.length && !frame.lit.includes(i) ? " faded" : "";
      const key = `op-${frame.layer}-${i}`;
      bars.forEach(([start, took], j) => {
        const end = scale(start + took);
        for (let line = Math.floor(scale(start) / room); line < lines && line * room < end; line++) {
          const x = Math.max(0, Math.min(scale(start) - line * room, room - 1.5));
          pen.rect(`${key}-${j}-${line}`, x + 1, top + 20 + line * 52, Math.max(1.5, Math.min(end - line * room, room) - x), 26, "held " + kind + faded);
        }
      });
      const [first, last] = [bars[0], bars[bars.length - 1]];
      const line = Math.min(lines - 1, Math.floor(scale(first[0]) / room));
      const x = scale(first[0]) - line * room;
      const wide = name.length * 6.2;
      if (wide < scale(last[0] + last[1] - first[0]) + 4 && x + wide < room) pen.text("name-" + key, x, top + 59 + line * 52, name, "small" + (faded ? " muted" : ""));
    });
    return top + 20 + lines * 52;
  }

  window.KvPlayer.views.gaps = function (pen, frame, scene) {
    const below = pen.legend(0, KINDS.map(([words, kind]) => [words, (x, y, key) => pen.rect(key, x, y, 20, 16, "held " + kind)])) + 8;
    const after = layer(pen, frame, scene, below) + 8;
    const longest = Math.max(...scene.steps.map(({ bars }) => bars[bars.length - 1][0] + bars[bars.length - 1][1]));
    scene.steps.slice(0, frame.shown).forEach((one, i) => step(pen, one, (time) => (time / longest) * pen.width, after + i * 48));
    const low = after + frame.shown * 48;
    pen.text("machine", 0, low + 10, pen.width < 320 ? `${scene.cpu}; without the profiler` : `one machine (${scene.cpu}), one thread; µs without the profiler`, "small muted");
    pen.height = low + 16;
  };
})();
