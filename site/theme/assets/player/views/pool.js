// Course machinery. Lesson 2's picture: requests with their tokens, the pool of blocks, the free list.
(function () {
  "use strict";
  const CHIP = 24;
  const LETTERS = 7.1; // about a letter's width at 13px

  function chips(pen, request, x, y, room) {
    let left = x;
    const places = [];
    request.words.forEach((word, i) => {
      const wide = Math.max(24, word.length * LETTERS + 10);
      if (left + wide > x + room) [left, y] = [x, y + CHIP + 5];
      const key = `${request.name}-word-${i}`;
      const look = request.letter + (i < request.written ? " held" : " wish");
      pen.rect(key, left, y, wide, CHIP, look);
      pen.text(key, left + wide / 2, y + 16.5, word, "mid");
      places.push([left + wide / 2, y + 16]);
      left += wide + 4;
    });
    return { bottom: y + CHIP, places };
  }

  function lanes(pen, frame, y) {
    const words = {};
    for (const one of frame.requests) {
      const request = { ...one, letter: one.name.toLowerCase() };
      pen.badge("lane-" + one.name, 12, y + 12, one.name);
      const { bottom, places } = chips(pen, request, 32, y, pen.width - 34);
      words[one.name] = places;
      const blocks = one.blocks.length ? `blocks ${one.blocks.join(", ")}` : "no blocks yet";
      const used = `${one.written} written in ${one.slots} slots`;
      pen.text(`lane-${one.name}-sum`, 32, bottom + 17, one.slots ? `${blocks} · ${used}` : blocks, "label muted num");
      y = bottom + 32;
    }
    return { y, words };
  }

  function block(pen, frame, scene, index, x, y, wide, words) {
    const owner = frame.requests.find((request) => request.blocks.includes(index));
    const letter = owner ? owner.name.toLowerCase() : "";
    const cell = (wide - 12 - 3 * (scene.block_size - 1)) / scene.block_size;
    pen.rect("block-" + index, x, y, wide, 72, owner ? "held " + letter : "free");
    pen.text("block-name-" + index, x + 8, y + 17, `block ${index}`, "label" + (owner ? " strong" : " muted"));
    if (owner) pen.text("block-owner-" + index, x + wide - 9, y + 17, owner.name, "end strong");
    for (let offset = 0; offset < scene.block_size; offset++) {
      const slot = index * scene.block_size + offset;
      const [left, top, token] = [x + 6 + offset * (cell + 3), y + 25, frame.slots[slot]];
      const mine = token && owner && token[0] === owner.name;
      pen.rect("cell-" + slot, left, top, cell, 24, (mine ? "cell " : "empty ") + letter);
      if (token) {
        const from = words[token[0]] && words[token[0]][Number(token.slice(1))];
        pen.text(`kv-${slot}-${token}`, left + cell / 2, top + 16, mine && token.length > 2 ? token.slice(1) : token, mine ? "label mid strong" : "label mid muted faded", { from });
      }
      pen.text("slot-" + slot, left + cell / 2, y + 64, slot, "small mid muted num");
      if (frame.read.includes(slot)) pen.rect("read-" + slot, left + 2, top + 20, cell - 4, 3, "solid " + letter);
      if (frame.wrote.includes(slot)) pen.rect("wrote-" + slot, left, top, cell, 24, "ring");
    }
  }

  function freeList(pen, frame, y) {
    pen.text("free-title", 0, y + 16, "free list", "label muted");
    const pitch = Math.min(33, (pen.width - 124) / Math.max(1, frame.free.length));
    let x = 66;
    frame.free.forEach((index, i) => {
      const last = i === frame.free.length - 1;
      pen.rect("free-" + index, x, y, pitch - 5, CHIP, "free");
      pen.text("free-" + index, x + (pitch - 5) / 2, y + 16.5, index, "mid num" + (last ? " strong" : ""));
      x += pitch;
    });
    const words = frame.free.length ? (pen.width > 500 ? "← the next to be handed out" : "← next") : "empty";
    pen.text("free-next", x + 4, y + 16.5, words, "label muted");
  }

  window.KvPlayer.views.pool = function (pen, frame, scene) {
    const fit = Math.max(1, Math.floor((pen.width + 6) / (scene.block_size * 19 + 20)));
    const columns = Math.min(fit, pen.width >= 560 ? scene.num_blocks : Math.ceil(scene.num_blocks / 2));
    const wide = (pen.width - 2 - 8 * (columns - 1)) / columns;
    const below = 84 * Math.ceil(scene.num_blocks / columns);
    const { y: bottom, words } = lanes(pen, frame, below + 44);
    for (let index = 0; index < scene.num_blocks; index++) {
      block(pen, frame, scene, index, 1 + (index % columns) * (wide + 8), 1 + Math.floor(index / columns) * 84, wide, words);
    }
    freeList(pen, frame, below);
    pen.height = bottom;
  };
})();
