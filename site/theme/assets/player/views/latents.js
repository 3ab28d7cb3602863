// Course machinery. Lesson 16's picture: each token's latent, stored once, and below it what every head makes of it.
(function () {
  "use strict";

  const LATENT = 22; // heights of a token's latent and of its rotary key
  const ROTARY = 9;
  const colour = (head) => "abcdef"[head];
  const signed = (value, digits) => value.toFixed(digits).replace("-", "−");
  const clip = (word, wide) => (word.length * 6.6 > wide ? word.slice(0, Math.max(2, Math.floor(wide / 6.6) - 1)) + "…" : word);

  // A token's slot: its word, its latent and its rotary key. It is a textured box until it is read.
  function slot(pen, i, word, isRead, isMarked, x, y, wide) {
    pen.text("word-" + i, x + wide / 2, y + 11, clip(word, wide + 3), "small mid");
    pen.rect("latent-" + i, x, y + 17, wide, LATENT, isRead ? "both" : "plain");
    pen.rect("rotary-" + i, x, y + 17 + LATENT + 2, wide, ROTARY, isRead ? "both" : "plain");
    if (isMarked) pen.rect("mark-" + i, x - 2, y + 15, wide + 4, LATENT + ROTARY + 6, "ring");
  }

  // A head's bar for each token of a block: exp(score − the head's largest).
  function bars(pen, head, frame, from, count, x, y, pitch, wide, tall) {
    pen.path(`base-${head}-${from}`, x, y + tall, `M0 0H${count * pitch - (pitch - wide)}`, "line");
    for (let j = 0; j < count; j++) {
      const part = frame.heads[head].parts[from + j];
      if (part === undefined) continue;
      const high = Math.max(1.5, tall * part);
      pen.rect(`part-${head}-${from + j}`, x + j * pitch, y + tall - high, wide, high, "held " + colour(head));
    }
  }

  function largest(pen, frame, head, x, y, style) {
    const value = frame.heads[head].largest;
    const rose = frame.rose.includes(head);
    pen.text("largest-" + head, x, y, value === null ? "–" : signed(value, 2), `${style} num` + (rose ? " strong accent" : " muted"));
  }

  window.KvPlayer.views.latents = function (pen, frame, scene) {
    const size = scene.block_size;
    const roomy = pen.width >= 560;
    const left = roomy ? 52 : 46; // of the heads' names
    const right = roomy ? 60 : 0; // of the largest scores
    const perLine = roomy ? frame.table.length : 2;
    const group = (pen.width - left - right) / perLine;
    const pitch = (group - 12) / size;
    const [wide, tall, lane] = [pitch - 4, roomy ? 30 : 19, roomy ? 40 : 26];
    const heads = frame.heads.length;
    let y = pen.legend(0, [
      ["latent", (x, y, key) => pen.rect(key, x, y, 20, 14, "plain")],
      ["rotary key", (x, y, key) => pen.rect(key, x, y + 3, 20, ROTARY, "plain")],
      ["read", (x, y, key) => pen.rect(key, x, y, 20, 14, "both")],
      ["a head's parts, exp(score − largest)", (x, y, key) => pen.rect(key, x, y, 20, 14, "held a")],
    ]);
    y += pen.folds ? 4 : 12;
    const line = 98 + heads * lane;
    frame.table.forEach((block, entry) => {
      const [x, top] = [left + (entry % perLine) * group, y + Math.floor(entry / perLine) * line];
      const count = Math.min(size, frame.words.length - entry * size);
      const now = entry === frame.entry;
      const times = frame.reads[entry];
      const often = times === 1 ? "once" : times + " times";
      const told = times ? (roomy ? ", read " : ": ") + often : "";
      pen.text("block-" + entry, x, top + 11, `block ${block}` + told, "label" + (now ? " strong" : " muted"));
      if (now) pen.rect("at", x - 5, top - 3, group - 6, 76, "ring");
      for (let j = 0; j < size; j++) {
        const [i, at] = [entry * size + j, x + j * pitch];
        if (j < count) slot(pen, i, frame.words[i], times > 0, i === frame.marked, at, top + 17, wide);
        else pen.rect("unwritten-" + i, at, top + 34, wide, LATENT + ROTARY + 2, "free");
      }
      for (let head = 0; head < heads; head++) bars(pen, head, frame, entry * size, count, x, top + 84 + head * lane, pitch, wide, tall);
    });
    const lines = Math.ceil(frame.table.length / perLine);
    for (let head = 0; head < heads; head++) {
      for (let row = 0; row < lines; row++) {
        const at = y + row * line + 84 + head * lane + tall / 2 + 4;
        pen.text(`head-${head}-${row}`, 0, at, "head " + head, "label");
      }
      if (roomy) largest(pen, frame, head, pen.width, y + 84 + head * lane + tall / 2 + 4, "label end");
    }
    if (roomy) pen.text("largest", pen.width, y + 66, "largest", "small end muted");
    y += lines * line;
    const numbers = (rows) => (rows ? rows.map((row) => row.map((value) => signed(value, 2)).join(" ")).join(" · ") : "–");
    const style = roomy ? "label" : "small";
    const at = roomy ? 184 : 0;
    const step = roomy ? 0 : 16;
    pen.text("out-name", 0, y, roomy ? "absorbed, first two numbers" : "absorbed, first two numbers of each head", style + " muted");
    pen.text("out", at, y + step, numbers(frame.out), style + " num" + (frame.out ? " strong" : " muted"));
    pen.text("expanded-name", 0, y + 20 + step, "expanded", style + " muted");
    pen.text("expanded", at, y + 20 + 2 * step, numbers(frame.expanded), style + " num" + (frame.expanded ? " strong" : " muted"));
    pen.height = y + 28 + 2 * step;
  };
})();
