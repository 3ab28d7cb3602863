// Course machinery. Lesson 3's picture: one memory seen as blocks and as a row of slots, the tables, a kernel's walk.
(function () {
  "use strict";

  function memory(pen, frame, scene) {
    const { width } = pen;
    const { block_size: size, num_blocks: count } = scene;
    const flat = frame.view === "flat";
    const columns = width >= 560 ? 4 : 2;
    const wide = (width - 2 - 8 * (columns - 1)) / columns;
    const perRow = columns * size;
    const [tall, gap] = columns === 4 ? [66, 8] : [56, 4]; // a block's height, and what is below it
    const reading = frame.walk ? frame.walk.seen.map(([slot]) => slot) : [];
    pen.text("view", 0, 13, flat ? "flat view" : "block view", "strong");
    pen.text("shape", flat ? 68 : 80, 13, flat ? `[${count * size}, H_kv, D]` : `[${count}, ${size}, H_kv, D]`, "mono label muted");
    for (let index = 0; index < count; index++) {
      const owner = frame.tables.find((table) => table.blocks.includes(index));
      const letter = owner ? owner.name.toLowerCase() : "";
      const [column, row] = [index % columns, Math.floor(index / columns)];
      const pitch = (width - 2) / perRow;
      const x = flat ? 1 + column * size * pitch : 1 + column * (wide + 8);
      const y = flat ? 28 + row * 50 : 24 + row * (tall + gap);
      const [w, h] = flat ? [size * pitch, 26] : [wide, tall];
      pen.rect("block-" + index, x, y, w, h, (owner ? "held " : "free ") + letter);
      if (index === 0) pen.texture("null", x, flat ? y : y + 18, w, flat ? h : tall - 36, "cross");
      if (!flat) pen.text("name-" + index, x + 8, y + (tall < 60 ? 14 : 16), index ? `block ${index}` : "null block", "label " + (owner ? "strong" : "muted"));
      if (owner && !flat) pen.text("owner-" + index, x + w - 9, y + (tall < 60 ? 14 : 16), owner.name, "end strong");
      const cell = flat ? pitch - 4 : (wide - 12 - 3 * (size - 1)) / size;
      for (let offset = 0; offset < size; offset++) {
        const slot = index * size + offset;
        const token = frame.slots[slot];
        const mine = token && owner && token[0] === owner.name;
        const left = flat ? x + 2 + offset * pitch : x + 6 + offset * (cell + 3);
        const top = flat ? y + 2 : y + (tall < 60 ? 18 : 22);
        if (index) pen.rect("cell-" + slot, left, top, cell, 22, (mine ? "cell " : "empty ") + letter);
        if (token) pen.text(`kv-${slot}-${token}`, left + cell / 2, top + 15, token, mine ? "label mid strong" : "label mid muted faded");
        const address = flat ? slot : `${index},${offset}`;
        pen.text("slot-" + slot, left + cell / 2, flat ? y + 40 : y + tall - (tall < 60 ? 4 : 7), address, "small mid muted num");
        if (reading.includes(slot)) pen.rect("read-" + slot, left, top, cell, 22, "ring");
        if (frame.wrote.includes(slot)) pen.rect("wrote-" + slot, left, top, cell, 22, "ring");
      }
    }
    return 24 + (tall + gap) * Math.ceil(count / columns);
  }

  function tables(pen, frame, y, room) {
    pen.text("tables", 0, y + 12, frame.plan ? "block_table" : "block tables", frame.plan ? "mono label muted" : "label muted");
    if (frame.plan) {
      pen.text("head-q", 118, y + 12, "rows of q", "label muted");
      pen.text("head-k", 206, y + 12, "keys", "label muted");
    }
    frame.tables.forEach((table, s) => {
      const [top, name] = [y + 20 + s * 33, table.name];
      pen.badge("row-" + name, 12, top + 13, name);
      const row = frame.plan ? frame.plan.rows[s] : table.blocks;
      const pitch = Math.min(36, (room - 34) / row.length);
      row.forEach((block, i) => {
        const [x, wide] = [34 + i * pitch, pitch - 4];
        pen.rect(`entry-${name}-${i}`, x, top, wide, 26, block ? "held " + name.toLowerCase() : "free");
        if (!block) pen.texture(`entry-${name}-${i}-null`, x, top, wide, 26, "cross");
        pen.text(`entry-${name}-${i}`, x + wide / 2, top + 17.5, block, block ? "mid strong num" : "mid muted num");
        if (frame.walk && frame.walk.s === s && frame.walk.entry === i) pen.rect("at", x - 2, top - 2, 36, 30, "ring");
      });
      if (!frame.plan) return;
      const [from, to] = [frame.plan.starts[s], frame.plan.starts[s + 1] - 1];
      pen.text(`rows-${name}`, 118, top + 17.5, from === to ? from : `${from} … ${to}`, "num");
      pen.text(`keys-${name}`, 206, top + 17.5, frame.plan.lens[s], "num");
    });
  }

  // Bars are the softmax's parts so far, all against the largest score so far: a new largest makes the others shrink.
  function softmax(pen, walk, slots, x, y, room) {
    const pitch = Math.min(44, room / Math.max(walk.seen.length, 7));
    pen.text("query", x, y + 12, `query ${walk.query}: exp(score − largest)`, "label muted");
    walk.seen.forEach(([slot, score], i) => {
      const high = Math.max(1.5, 46 * Math.exp(score - walk.best));
      const letter = slots[slot] ? slots[slot][0].toLowerCase() : "";
      pen.rect("bar-" + slot, x + i * pitch, y + 68 - high, pitch - 6, high, "held " + letter);
      pen.text("bar-" + slot, x + i * pitch + (pitch - 6) / 2, y + 82, slots[slot] || "?", "small mid");
    });
    pen.text("sum", x, y + 102, `largest ${walk.best.toFixed(2)} · sum ${walk.sum.toFixed(2)}`, "strong num");
  }

  window.KvPlayer.views.tables = function (pen, frame, scene) {
    const side = pen.width >= 560;
    const y = memory(pen, frame, scene) + 10;
    tables(pen, frame, y, pen.width);
    const [x, top] = side ? [300, y] : [0, y + 90];
    if (frame.walk) softmax(pen, frame.walk, frame.slots, x, top, pen.width - x);
    const room = frame.walk ? top + 108 : 0;
    pen.height = Math.max(room, y + 20 + 33 * frame.tables.length);
  };
})();
