// Course machinery. Lesson 10's picture: the tables of a replayed step, a column for each row of the batch, and the copy.
(function () {
  "use strict";
  const [HIGH, LABELS, MARGIN] = [26, 98, 16];
  const SHORT = [["positions", HIGH], ["slot_mapping", HIGH], ["cu_seqlens_q", HIGH], ["seq_lens_kv", HIGH]];

  const clip = (word, wide) => {
    const most = Math.floor((wide - 2) / 6.2);
    return word.length <= most ? word : word.slice(0, most - 1) + "…";
  };

  // The captured sizes, each with its replays, and the steps that were launched kernel by kernel.
  function sizes(pen, frame) {
    const eager = ["eager", frame.eager, frame.act === "eager"];
    const running = frame.act === "replay";
    const wide = Math.min(76, pen.width / 4 - 5);
    let x = 2;
    for (const [name, count, on] of [...frame.replays.map(([size, n]) => [`size ${size}`, n, running && size === frame.size]), eager]) {
      pen.rect("size-" + name, x, 1, wide, 26, name === "eager" ? "free" : "plain");
      pen.text("size-" + name, x + wide / 2, 18.5, `${name} × ${count}`, "label mid num" + (on ? " strong" : ""));
      if (on) pen.rect("size-on", x - 1, 0, wide + 2, 28, "ring");
      x += wide + 5;
    }
  }

  // What a row is in this step: a request, padding, or something left over that the step does not read.
  function kind(frame, row) {
    if (frame.act === "none") return "padding";
    if (row >= frame.size) return "unread";
    return row < frame.names.length ? "request" : "padding";
  }

  function look(frame, row) {
    const what = kind(frame, row);
    return what === "unread" ? "free" : what === "padding" ? "plain" : "held " + frame.names[row].toLowerCase();
  }

  const INK = { unread: " muted faded", padding: " muted", request: "" };
  const ink = (frame, row) => INK[kind(frame, row)];

  function heads(pen, frame, scene, at, y) {
    if (frame.act === "eager") return pen.text("heads", at(0) + 3, y + 16, `${frame.names.join(", ")} use tables of their own`, "small muted");
    for (let row = 0; row < scene.rows; row++) {
      const middle = at(row + 0.5);
      const what = kind(frame, row);
      if (what === "request") pen.badge("head-" + frame.names[row], middle, y + 12, frame.names[row]);
      else pen.text("head-" + row, middle, y + 16, what, "small mid muted");
    }
  }

  // One value for each row; cu_seqlens_q has them at the rows' borders.
  function line(pen, frame, name, at, y, high) {
    const border = name === "cu_seqlens_q";
    frame.tables[name].forEach((value, i) => {
      const row = border ? Math.max(0, i - 1) : i;
      const wide = border ? 30 : at(1) - at(0) - 6;
      const x = border ? at(i) - wide / 2 : at(i) + 3;
      const style = !border ? look(frame, row) : kind(frame, row) === "unread" ? "free" : "cell";
      pen.rect(`${name}-${i}`, x, y, wide, high - 4, style);
      const word = name === "token_ids" && kind(frame, row) === "request" ? frame.fed[row] : "";
      pen.text(`${name}-${i}`, x + wide / 2, y + 15.5, value, "label mid num" + ink(frame, row));
      if (word) pen.text(`word-${i}`, x + wide / 2, y + 30, clip(word, wide), "small mid mono muted");
    });
  }

  // The block table: its row in each column, in one line or, where the page is narrow, in several.
  function blocks(pen, frame, at, y) {
    const room = at(1) - at(0) - 6;
    const perLine = Math.max(3, Math.floor(room / 22));
    const width = frame.tables.block_table[0].length;
    const pitch = room / Math.min(perLine, width);
    frame.tables.block_table.forEach((entries, row) => {
      entries.forEach((block, i) => {
        const [x, top] = [at(row) + 3 + (i % perLine) * pitch, y + Math.floor(i / perLine) * 22];
        const style = block || kind(frame, row) !== "request" ? look(frame, row) : "plain";
        pen.rect(`block-${row}-${i}`, x, top, pitch - 2, 20, style);
        pen.text(`block-${row}-${i}`, x + pitch / 2 - 1, top + 14, block, "small mid num" + (ink(frame, row) || (block ? "" : " muted")));
      });
    });
    return 22 * Math.ceil(width / perLine);
  }

  function logits(pen, frame, at, y) {
    frame.chosen.forEach((word, row) => {
      const [x, wide] = [at(row) + 3, at(1) - at(0) - 6];
      const fresh = frame.act === "replay" && row < frame.size;
      const used = fresh && kind(frame, row) === "request";
      pen.rect("logits-" + row, x, y, wide, HIGH - 4, used ? look(frame, row) : fresh ? "plain" : "free");
      if (fresh && !used) pen.texture("logits-x-" + row, x, y, wide, HIGH - 4, "cross");
      pen.text("logits-" + row, x + wide / 2, y + 15.5, clip(word, wide), "small mid mono" + (used ? " strong" : fresh ? " muted" : " muted faded"));
      if (used) pen.rect("logits-on-" + row, x - 1, y - 1, wide + 2, HIGH - 2, "ring");
    });
  }

  // Both blocks, byte by byte, with the part that belongs to the step.
  function copy(pen, frame, y) {
    const unit = (pen.width - LABELS - 2) / frame.bytes;
    const ends = [...frame.starts.slice(1), frame.bytes];
    const done = { fill: ["host"], copy: ["host", "device"], replay: ["host", "device"] }[frame.act] || [];
    ["host", "device"].forEach((name, i) => {
      const top = y + 24 * i;
      pen.text("copy-" + name, 0, top + 13, name, "label muted");
      frame.starts.forEach((start, j) => pen.rect(`copy-${name}-${j}`, LABELS + start * unit, top, (ends[j] - start) * unit - 2, 18, "plain"));
      if (!done.includes(name)) return;
      frame.starts.filter((start) => start < frame.copied).forEach((start, j) => {
        pen.rect(`copied-${name}-${j}`, LABELS + start * unit, top, (Math.min(ends[j], frame.copied) - start) * unit - 2, 18, "held f");
      });
    });
    if (frame.act === "copy") pen.rect("copy-on", LABELS - 2, y + 22, frame.copied * unit + 2, 22, "ring");
    const words = frame.copied ? `${frame.copied} of ${frame.bytes} bytes${frame.act === "fill" ? "" : ", in one copy"}` : `${frame.bytes} bytes, none copied in this step`;
    pen.text("copy-words", 0, y + 62, words, "label muted num");
    return y + 70;
  }

  window.KvPlayer.views.capture = function (pen, frame, scene) {
    const pitch = (pen.width - LABELS - MARGIN) / scene.rows;
    const at = (row) => LABELS + row * pitch;
    const name = (words, y) => pen.text("name-" + words, 0, y + 15.5, words, "mono small");
    sizes(pen, frame);
    pen.text("where", 0, 54, frame.act === "fill" ? "on the host" : "on the device", "label strong");
    heads(pen, frame, scene, at, 38);
    let y = 68;
    name("token_ids", y);
    line(pen, frame, "token_ids", at, y, 40);
    y += 42;
    for (const [table, high] of SHORT) {
      name(table, y);
      line(pen, frame, table, at, y, high);
      y += high + 2;
    }
    name("block_table", y);
    y += blocks(pen, frame, at, y) + 8;
    pen.text("name-logits", 0, y + 15.5, "logits choose", "label muted");
    logits(pen, frame, at, y);
    pen.height = copy(pen, frame, y + HIGH + 12);
  };
})();
