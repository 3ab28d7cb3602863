// Course machinery. Lesson 19's picture: a prefill worker, the buffers that both processes see, and the receiver.
(function () {
  "use strict";
  const HIGH = 30;

  const shown = (text) => text.replace(/ /g, "␣");

  // Boxes of a block each, as many as fit into a row. Returns where the next row begins.
  function blocks(pen, name, x, y, boxes) {
    const perRow = pen.width >= 480 ? 11 : 6;
    const pitch = Math.min(52, (pen.width - x - 2) / perRow);
    boxes.forEach((box, i) => {
      const [left, top] = [x + 2 + (i % perRow) * pitch, y + Math.floor(i / perRow) * (HIGH + 6)];
      pen.rect(`${name}-${i}`, left, top, pitch - 6, HIGH, box.style);
      if (box.text) pen.text(`${name}-${i}`, left + (pitch - 6) / 2, top + 20, shown(box.text), "small mid mono");
    });
    return y + (HIGH + 6) * Math.max(1, Math.ceil(boxes.length / perRow));
  }

  // The worker: the prompt in blocks, those that it has computed filled.
  function worker(pen, frame, scene, y) {
    const { number, prompt, computed, dead } = frame.worker;
    const does = dead ? "killed" : prompt ? `${computed} of ${prompt.length} tokens computed` : "nothing to do";
    pen.text("worker", 0, y + 12, "prefill worker " + number, "label strong");
    pen.text("does", 130, y + 12, does, "label muted num");
    const name = Object.keys(scene.prompts).find((one) => prompt && scene.prompts[one].startsWith(prompt)) || "";
    const boxes = [];
    for (let at = 0; at < prompt.length; at += scene.block_size) {
      const style = at < computed && !dead ? "held " + name.toLowerCase() : "free";
      boxes.push({ text: prompt.slice(at, at + scene.block_size), style });
    }
    blocks(pen, "prompt", 0, y + 22, boxes);
    if (dead) pen.path("dead", 0, y + 22, "M2 15H" + Math.min(pen.width - 4, boxes.length * 52), "cross");
    return y + 22 + HIGH + 12;
  }

  // The buffers: lent ones with strokes, owed ones with a cross.
  function stage(pen, frame, y) {
    const count = (state) => frame.buffers.filter((buffer) => buffer.state === state).length;
    const words = ["lent", "filled", "owed", "free"].map((state) => `${count(state)} ${state}`).join(", ");
    pen.text("stage", 0, y + 12, "buffers", "label strong");
    pen.text("counts", 66, y + 12, words, "label muted num");
    const pitch = Math.min(86, (pen.width - 4) / frame.buffers.length);
    frame.buffers.forEach((buffer, i) => {
      const [x, top, wide] = [2 + i * pitch, y + 22, pitch - 6];
      const style = buffer.state === "free" ? "free" : "held " + buffer.owner.toLowerCase();
      pen.rect("buffer-" + i, x, top, wide, HIGH, buffer.state === "filled" ? style : "free");
      if (buffer.state === "lent") pen.texture("lent-" + i, x, top, wide, HIGH, "strokes");
      if (buffer.state === "owed") pen.texture("owed-" + i, x, top, wide, HIGH, "cross");
      if (buffer.text) pen.text("buffer-" + i, x + wide / 2, top + 20, shown(buffer.text), "small mid mono");
      pen.text("state-" + i, x + wide / 2, top + HIGH + 14, buffer.state, "small mid muted");
    });
    return y + 22 + HIGH + 30;
  }

  function receiver(pen, frame, y) {
    pen.text("receiver", 0, y + 12, "receiver", "label strong");
    pen.text("answer", 70, y + 12, `C’s answer: “${frame.answer}”`, "label muted");
    const tables = frame.tables;
    let top = y + 24;
    for (const name of ["C", ...Object.keys(tables).filter((one) => one !== "C")]) {
      if (!tables[name]) continue;
      pen.badge("holder-" + name, 14, top + 15, name);
      top = blocks(pen, "table-" + name, 32, top, tables[name].map((text) => ({ text: text.trimEnd(), style: "held " + name.toLowerCase() }))) + 4;
    }
    if (frame.waiting) {
      pen.badge("waits", 14, top + 15, frame.waiting);
      pen.text("waits-words", 36, top + 20, "waits in the queue, without a block", "label muted");
      top += HIGH + 10;
    }
    return top;
  }

  window.KvPlayer.views.handover = function (pen, frame, scene) {
    let y = pen.legend(0, [
      ["complete ", (x, y, key) => pen.rect(key, x, y, 20, 14, "held a")],
      ["lent", (x, y, key) => (pen.rect(key, x, y, 20, 14, "free"), pen.texture(key + "-t", x, y, 20, 14, "strokes"))],
      ["owed", (x, y, key) => (pen.rect(key, x, y, 20, 14, "free"), pen.texture(key + "-t", x, y, 20, 14, "cross"))],
    ]);
    y = worker(pen, frame, scene, y + 14);
    if (frame.said) pen.text("said", 2, y + 8, frame.said, "small strong num");
    y = stage(pen, frame, y + 22);
    pen.height = receiver(pen, frame, y);
  };
})();
