// Course machinery. The picture of how-the-pieces-fit: a ring of stations around the pool, and tokens on their way.
(function () {
  "use strict";
  const LETTER = 5.9; // about a letter's width at 11px
  const FEW = 6; // tokens in the tokenizer that are written out

  const clip = (text, room) => {
    const most = Math.floor(room / LETTER);
    return text.length <= most ? text : text.slice(0, Math.max(1, most - 1)).trimEnd() + "…";
  };
  const said = (name) => name.toLowerCase();

  // ---- where everything is -----------------------------------------------------------------------------------

  // Wide, the stations run clockwise: four above the pool, four below it. Narrow, they run down in two columns.
  function plan(pen, scene) {
    const isWide = pen.width >= 560;
    const [margin, gap, high, perRow] = isWide ? [18, 22, 98, 4] : [10, 8, 58, 2];
    const wide = (pen.width - 2 * margin - (perRow - 1) * gap) / perRow;
    const order = isWide ? [0, 1, 2, 3, 7, 6, 5, 4] : [0, 1, 3, 2, 4, 5, 7, 6]; // cards, row by row
    const [blockHigh, slotHigh] = isWide ? [56, 32] : [38, 21];
    const [above, down, head, row] = isWide ? [1, 0, 28, 20] : [2, 8, 23, 17]; // rows above the pool; a card's insides
    const top = above * (high + down) - down + (isWide ? 34 : 8);
    const below = top + ((scene.num_blocks - 1) / perRow) * blockHigh + (isWide ? 16 : 4);
    const column = (i) => margin + (i % perRow) * (wide + gap);
    const cards = {};
    order.forEach((station, i) => {
      const line = Math.floor(i / perRow);
      const y = line < above ? line * (high + down) : below + (line - above) * (high + down);
      cards[scene.stations[station].name] = { ...scene.stations[station], x: column(i), y, wide, high, head, row };
    });
    const block = (number) => ({ x: column(number - 1), y: top + Math.floor((number - 1) / perRow) * blockHigh });
    const slotWide = wide / scene.block_size;
    const slot = (index) => {
      const { x, y } = block(Math.floor(index / scene.block_size));
      return { x: x + (index % scene.block_size) * slotWide, y: y + 16, wide: slotWide - 2, high: slotHigh };
    };
    return { isWide, cards, block, slot, wide, slotHigh, top, below, height: below + above * (high + down) - down + 2 };
  }

  // The way around, one line for each step of it; the one just taken is marked.
  function ways(pen, frame, before, scene, { cards, isWide, top, below }) {
    scene.stations.forEach(({ name }, i) => {
      const [from, to] = [cards[name], cards[scene.stations[(i + 1) % scene.stations.length].name]];
      const isTaken = frame.at === to.name && before && before.at === name;
      const [x, y] = [from.x + from.wide, from.y + from.high / 2];
      let [at, d] = [[x, y], ""];
      if (from.y === to.y && from.x < to.x) d = `M0 0H${to.x - x}m-5 -4l4 4l-4 4`;
      else if (from.y === to.y) [at, d] = [[from.x, y], `M0 0H${to.x + to.wide - from.x}m5 -4l-4 4l4 4`];
      else if (i === 7) [at, d] = [[from.x, y], `M0 0h-9V${to.y + to.high / 2 - y}h7m-4 -4l4 4l-4 4`];
      else if (isWide) d = `M0 0h9V${to.y + to.high / 2 - y}h-7m4 -4l-4 4l4 4`;
      else if (i === 3) [at, d] = [[pen.width / 2, top], `M0 0V${below - top - 8}`];
      else [at, d] = [[from.x + from.wide / 2, from.y + from.high], "M0 0v9m-4 -5l4 4l4 -4"];
      pen.path("way-" + name, at[0], at[1], d, isTaken ? "arrow" : "line");
    });
    const model = cards.model; // it reads and writes the pool
    if (isWide) pen.path("way-pool", model.x + model.wide / 2, below - 14, "M0 14V0m-4 5l4 -5l4 5", frame.at === "model" ? "arrow" : "line");
  }

  // ---- what stands in a station ------------------------------------------------------------------------------

  function disc(pen, key, x, y, name) {
    pen.add("circle", key + "-disc", x + 8, y + 8, { class: "disc " + said(name), r: 8 });
    pen.text(key, x + 8, y + 12, name, "small mid strong");
  }

  const lines = (text, room, most) => {
    const rows = [""];
    for (const word of text.split(/(?<= )/)) {
      if ((rows[rows.length - 1] + word).trimEnd().length * LETTER > room && rows[rows.length - 1]) rows.push("");
      rows[rows.length - 1] += word;
    }
    if (rows.length > most) rows.splice(0, rows.length - most).length && (rows[0] = "… " + rows[0]);
    return rows;
  };

  const INSIDE = {
    server(pen, { frame, scene, inside: { x, y, wide, high, row } }) {
      const here = frame.requests.filter(({ name, where }) => where !== "ended" || frame.about.includes(name)).slice(-2);
      const most = Math.max(1, Math.floor(high / 14 / Math.max(1, here.length)));
      let top = y;
      for (const { name, text } of here) {
        disc(pen, "server-" + name, x, top - 2, name);
        const rows = lines(scene.requests[name].text, wide - 22, Math.max(1, most - (text ? 1 : 0)));
        const shown = most > 1 || !text ? rows.map((row) => [row.trimEnd(), "small muted"]) : [];
        if (text) shown.push([text.trim(), "small strong"]);
        shown.forEach(([row, style], i) => pen.text(`server-${name}-${i}`, x + 22, top + 10 + 14 * i, row, style));
        top += Math.max(row, 14 * shown.length + 4);
      }
    },

    tokenizer(pen, { frame, scene, inside: { x, y, wide, high } }) {
      const last = frame.requests[frame.requests.length - 1];
      if (!last || (last.where === "new" && frame.at === "server")) return;
      const { ids } = scene.requests[last.name];
      const isHere = frame.at === "tokenizer";
      const down = isHere ? (ids.length <= FEW && high > 60 ? 44 : 22) : 0; // below the tokens
      lines(ids.join(" "), wide * 0.9, 99)
        .slice(0, Math.max(1, Math.floor((high - down) / 14)))
        .forEach((row, i, all) => {
          const more = i === all.length - 1 && !row.endsWith(String(ids[ids.length - 1]));
          pen.text("ids-" + i, x, y + down + 10 + 14 * i, row.trimEnd() + (more ? " …" : ""), "small mono num" + (isHere ? "" : " muted"));
        });
    },

    scheduler(pen, { frame, inside: { x, y, row } }) {
      queued(frame).forEach(({ name, where }, i) => {
        disc(pen, "queue-" + name, x, y + row * i - 2, name);
        pen.text(`queue-${name}-where`, x + 22, y + 10 + row * i, where, "small" + (where === "runs" ? " strong" : " muted"));
      });
    },

    tree(pen, { frame, scene, inside: { x, y, wide, row } }) {
      pen.add("circle", "root", x + 5, y + 6, { class: "root", r: 5 });
      const pitch = Math.min(24, (wide - 16) / (scene.num_blocks - 1));
      if (!frame.tree.length) pen.text("tree-empty", x + 18, y + 10, "empty", "small muted");
      frame.tree.forEach((block, i) => {
        pen.path("twig-" + block, x + 10 + i * pitch, y + 6, `M0 0h${i ? 4 : 8}`, "line");
        small(pen, frame, "tree-" + block, block, x + 16 + i * pitch, y - 2, pitch - 4);
      });
      const asked = frame.at === "tree" && frame.requests.find(({ name }) => frame.about.length === 1 && name === frame.about[0]);
      if (!asked || asked.answer.length) return;
      disc(pen, "asked", x, y + row, asked.name);
      pen.text("asked-found", x + 22, y + row + 12, `${asked.found} of ${scene.requests[asked.name].ids.length} found`, "small strong num");
    },

    tables(pen, { frame, inside: { x, y, wide, row } }) {
      Object.entries(frame.tables).forEach(([name, blocks], i) => {
        disc(pen, "table-" + name, x, y - 2 + row * i, name);
        const pitch = Math.min(24, (wide - 22) / Math.max(6, blocks.length));
        blocks.forEach((block, j) => small(pen, frame, `table-${name}-${j}`, block, x + 22 + j * pitch, y - 2 + row * i, pitch - 3));
      });
    },

    model(pen, { frame, inside: { x, y, high } }) {
      if (!frame.writes.length) return;
      const isNow = frame.at === "model" ? "" : " muted";
      const count = frame.writes.length;
      pen.text("model-step", x, y + 10, `step ${frame.step}: ${count} token${count > 1 ? "s" : ""}`, "small num strong" + isNow);
      pen.text("model-kv", x, y + 25, "K and V → pool", "small" + (isNow || " "));
      if (high > 34) pen.text("model-out", x, y + 40, "logits → sampler", "small" + (isNow || " "));
    },

    sampler(pen, { frame, inside: { x, y, wide, high } }) {
      const most = Math.max(1, Math.floor(high / 17 / Math.max(1, frame.rows.length)));
      let top = y - 2;
      const isNow = frame.at === "sampler" ? " strong" : "";
      for (const { name, best } of frame.rows) {
        disc(pen, "best-" + name, x, top, name);
        best.slice(0, most).forEach(([word, percent], i) => {
          const room = wide - 22;
          pen.rect(`best-${name}-${i}`, x + 22, top + 1, Math.max(2, (room * percent) / 100), 14, "tint " + said(name));
          pen.text(`best-${name}-${i}`, x + 26, top + 12, clip(word.trim(), room / 2), "small" + (i ? " muted" : isNow));
          pen.text(`best-${name}-${i}-share`, x + wide - 4, top + 12, percent + " %", "small end num" + (i ? " muted" : ""));
          top += 17;
        });
      }
    },

    detokenizer(pen, { frame, inside: { x, y, row } }) {
      Object.entries(frame.pieces).forEach(([name, piece], i) => {
        disc(pen, "piece-" + name, x, y - 2 + row * i, name);
        pen.text("piece-" + name + "-text", x + 22, y + 10 + row * i, `“${piece}”`, frame.at === "detokenizer" ? "label strong" : "label muted");
      });
    },
  };

  const queued = (frame) => frame.requests.filter(({ where }) => where === "waits" || where === "runs");

  // A block's number in a box of its holders' colour.
  function small(pen, frame, key, block, x, y, wide) {
    const holders = holdersOf(frame, block);
    pen.rect(key, x, y, wide, 16, holders.length === 1 ? "held " + said(holders[0]) : holders.length ? "both" : "plain");
    pen.text(key, x + wide / 2, y + 12, block, "small mid num strong");
  }

  const holdersOf = (frame, block) => Object.keys(frame.tables).filter((name) => frame.tables[name].includes(block));

  function station(pen, frame, { name, title, lesson, x, y, wide, high }) {
    const isHere = frame.at === name;
    pen.rect("card-" + name, x, y, wide, high, isHere ? "cell" : "plain");
    pen.text("title-" + name, x + 10, y + 17, title, "label strong");
    const words = title.length * 6.6 + 48 < wide - 18 ? "lesson " + lesson : lesson;
    pen.text("lesson-" + name, x + wide - 9, y + 17, words, "small end " + (isHere ? "accent" : "muted"));
  }

  function inside(pen, frame, scene, { name, says, x, y, wide, high, head, row }) {
    const count = pen.shapes.length;
    INSIDE[name](pen, { frame, scene, inside: { x: x + 10, y: y + head, wide: wide - 20, high: high - head - 2, row } });
    if (pen.shapes.length === count && frame.at !== name) pen.text("says-" + name, x + 10, y + head + 10, says, "small muted");
    if (frame.at === name) pen.rect("here", x, y, wide, high, "ring");
  }

  // ---- the pool, and the tokens ------------------------------------------------------------------------------

  function pool(pen, frame, scene, { isWide, block, slot, wide }) {
    if (isWide) pen.text("pool", block(1).x + 1, block(1).y - 6, `The pool: K and V of ${scene.block_size} tokens in each block`, "small muted");
    for (let number = 1; number < scene.num_blocks; number++) {
      const [{ x, y }, holders] = [block(number), holdersOf(frame, number)];
      const state = holders.length ? holders.join(", ") : frame.tree.includes(number) ? "cached" : "free";
      pen.text(`block-${number}`, x + 1, y + 11, number, "small strong num");
      pen.text(`block-${number}-state`, x + wide - 3, y + 11, state, "small end" + (holders.length ? " strong" : " muted"));
      const style = state === "free" ? "free" : "empty " + (holders.length === 1 ? said(holders[0]) : "");
      for (let i = 0; i < scene.block_size; i++) {
        const spot = slot(number * scene.block_size + i);
        pen.rect(`slot-${number}-${i}`, spot.x, spot.y, spot.wide, spot.high, style);
      }
    }
  }

  // What has just changed: blocks that were found or handed out, slots that were written.
  function rings(pen, frame, before, scene, { block, slot, wide, slotHigh }) {
    const known = new Set(Object.values((before || frame).tables).flat());
    const asks = frame.at === "tree" && frame.requests.find(({ name, answer }) => name === frame.about[0] && !answer.length);
    for (let number = 1; number < scene.num_blocks; number++) {
      const isFound = asks && (frame.tables[asks.name] || []).includes(number);
      const isNew = frame.at === "tables" && !known.has(number) && holdersOf(frame, number).length;
      if (isFound || isNew) pen.rect("block-ring-" + number, block(number).x - 3, block(number).y + 13, wide + 4, slotHigh + 6, "ring");
    }
    if (before && frame.writes.join() === before.writes.join()) return;
    for (const index of frame.writes) pen.rect("write-" + index, slot(index).x, slot(index).y, slot(index).wide, slot(index).high, "ring");
  }

  // from: the card that it comes out of, if it is new.
  function token(pen, key, word, spot, style, from) {
    const more = { from: [from.x + from.wide / 2, from.y + from.high / 2] };
    const words = spot.wide > 15 ? clip(word.trim(), spot.wide + (spot.wide < 32 ? 3 : 6)) : "";
    pen.rect(key, spot.x, spot.y, spot.wide, spot.high, style, more);
    pen.text(key, spot.x + spot.wide / 2, spot.y + spot.high / 2 + 4, words, "small mid", more);
  }

  // Where a token without K and V is: in the tokenizer, in the queue, or just sampled. i of count: its place there.
  function onTheWay(frame, { cards, isWide }, { name, where }, i, count, isSampled) {
    if (isSampled && frame.at === "detokenizer") {
      const { x, y, wide, head, row } = cards.detokenizer;
      return { x: x + wide - 48, y: y + head - 2 + row * Object.keys(frame.pieces).indexOf(name), wide: 38, high: 18 };
    }
    const isNew = where === "new";
    const { x, y, wide, head, row } = isNew ? cards.tokenizer : cards.scheduler;
    const line = isNew ? 0 : queued(frame).findIndex((one) => one.name === name);
    const [left, room, most] = isNew ? [10, wide - 20, 44] : [64, wide - 72, 34];
    const perRow = isNew && isWide && count <= FEW ? Math.ceil(FEW / 2) : count;
    const pitch = Math.min(most, room / perRow);
    const top = y + head - 2 + row * line + 22 * Math.floor(i / perRow);
    return { x: x + left + (i % perRow) * pitch, y: top, wide: pitch - 2, high: isNew ? 18 : 16 };
  }

  // Each token once, always in this order, so that it moves from place to place.
  function tokens(pen, frame, scene, places) {
    const slots = new Map(frame.slots.map(([index, name, position]) => [`${name}-${position}`, index]));
    for (const request of frame.requests) {
      const { name, where, found, answer } = request;
      const all = [...scene.requests[name].words, ...answer];
      const isOpen = (_, position) => position >= found && !slots.has(`${name}-${position}`);
      const count = all.filter(isOpen).length;
      const first = all.length - count; // what has no K and V yet is at the end
      const isGone = where === "ended" || (where === "new" && frame.at === "server");
      all.forEach((word, position) => {
        const index = slots.get(`${name}-${position}`);
        if (index === undefined && (isGone || position < found)) return;
        const holders = index === undefined ? [name] : holdersOf(frame, Math.floor(index / scene.block_size));
        const style = holders.length > 1 ? "both" : holders.length ? "held " + said(holders[0]) : "plain";
        const isSampled = answer.length > 0 && position === all.length - 1;
        const spot = index === undefined ? onTheWay(frame, places, request, position - first, count, isSampled) : places.slot(index);
        const from = position < scene.requests[name].words.length ? places.cards.server : places.cards.sampler;
        token(pen, `token-${name}-${position}`, word, spot, style, from);
      });
    }
  }

  // What stays comes first: a shape that goes would stop those behind it from moving.
  window.KvPlayer.views.engine = function (pen, frame, scene, frames, index) {
    const [before, places] = [frames[index - 1], plan(pen, scene)];
    const cards = Object.values(places.cards);
    ways(pen, frame, before, scene, places);
    pool(pen, frame, scene, places);
    cards.forEach((card) => station(pen, frame, card));
    tokens(pen, frame, scene, places);
    rings(pen, frame, before, scene, places);
    cards.forEach((card) => inside(pen, frame, scene, card));
    for (const { name, x, y, wide, high } of cards) {
      const attrs = { class: "door at-" + name, width: wide, height: high, rx: 4, fill: "none", "pointer-events": "all" };
      pen.add("rect", "door-" + name, x, y, attrs);
    }
    pen.height = places.height;
  };
})();
