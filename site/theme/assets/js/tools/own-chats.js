/* The page of ten minutes: the reader's chats, cut into the pocket model's tokens and kept in a tree of blocks, as
   mini_engine/kv/prefix_cache.py keeps them. Needs bytes.js, which has the tokenizer. */
(function () {
  "use strict";
  const SIZE = 4; // tokens of a block, as in lesson 8's player
  const [LEFT, RIGHT, PITCH, GAP, ROW] = [12, 34, 34, 4, 26]; // pixels: margins, widest step, between blocks, beside a row
  const NAMES = ["A", "A again", "B", "C"];
  const SHADES = ["a", "d", "b", "c"];

  const ids = (text) => window.KvTools.bytes.work({ text }).tokens.map(({ id }) => id);
  const said = (role, text) => `<|im_start|>${role}\n${text}<|im_end|>\n`;
  const ASK = "<|im_start|>assistant\n"; // what makes the model answer

  // What each request sends, and what the engine has of it at its end: an answer's last token is never fed.
  function requests({ system, first, answer, again, b, c }) {
    const start = said("system", system);
    const chat = start + said("user", first) + ASK;
    const later = chat + answer + "<|im_end|>\n" + said("user", again) + ASK;
    const asked = [chat, later, ...[b, c].map((text) => start + said("user", text) + ASK)];
    return asked.map((text, i) => ({ prompt: ids(text), kept: ids(i ? text : chat + answer) }));
  }

  const blocks = (tokens, most) => Array.from({ length: Math.floor(most / SIZE) }, (_, i) => tokens.slice(i * SIZE, (i + 1) * SIZE).join());

  // A node is a block: who computed it, who found it, whose prompts end with it.
  function work(values) {
    const root = { below: new Map(), depth: 0 };
    const chats = requests(values).map(({ prompt, kept }, by) => {
      let [node, found] = [root, 0];
      for (const key of blocks(prompt, prompt.length - 1)) { // one token is computed in any case: it gives the next
        if (!node.below.has(key)) break;
        node = node.below.get(key);
        node.finders.push(by);
        found += SIZE;
      }
      node = root;
      const whole = Math.floor(prompt.length / SIZE);
      blocks(kept, kept.length).forEach((key, i) => {
        if (!node.below.has(key)) node.below.set(key, { by, finders: [], ends: [], below: new Map(), depth: i + 1 });
        node = node.below.get(key);
        if (i + 1 === whole) node.ends.push(by);
      });
      return { tokens: prompt.length, found };
    });
    return { chats, root };
  }

  function deepest(node) {
    return Math.max(node.depth, ...[...node.below.values()].map(deepest));
  }

  // Each block to the right of the one before it; a chat that parts from another gets a row of its own.
  function draw(values, { root }, wide) {
    const pitch = Math.min(PITCH, (wide - LEFT - RIGHT) / deepest(root));
    const cell = Math.max(2, pitch - GAP);
    const shapes = [];
    let rows = 0;
    function put(node) {
      const below = [...node.below.values()];
      const heights = below.map(put);
      const y = heights.length ? heights[(heights.length - 1) >> 1] : 22 + (cell + ROW) * rows++;
      if (node === root) return y;
      const x = LEFT + (node.depth - 1) * pitch;
      heights.forEach((to) => shapes.unshift(`<path class="way" d="M${x + cell} ${y + cell / 2}h${GAP / 2}V${to + cell / 2}h${GAP / 2}"/>`));
      shapes.push(`<rect class="cell ${SHADES[node.by]}" x="${x}" y="${y}" width="${cell}" height="${cell}" rx="3"/>`);
      node.finders.forEach((by, i) => shapes.push(`<circle class="${SHADES[by]}" cx="${x + 3 + 6 * i}" cy="${y + cell + 6}" r="2.4"/>`));
      const ends = node.ends.map((by) => NAMES[by]).join(", ");
      if (ends && below.length) shapes.push(`<text class="letter" x="${x + cell / 2}" y="${y - 5}">${ends}</text>`);
      else if (ends) shapes.push(`<text class="letter last" x="${x + cell}" y="${y - 5}">${ends}</text>`);
      return y;
    }
    put(root);
    const key = `<p>A square is a block of ${SIZE} tokens in the colour of the request that computed it; a dot, a request that found it.</p>`;
    return `${key}<svg class="kv-tree" viewBox="0 0 ${wide} ${22 + (cell + ROW) * rows - 8}" aria-hidden="true">${shapes.join("")}</svg>`;
  }

  window.KvTools = Object.assign(window.KvTools || {}, {
    "own-chats": {
      title: "Type chats of your own",
      fields: [
        { key: "system", label: "system prompt", value: "You are a helpful assistant.", text: 60 },
        { key: "first", label: "A asks", value: "What is the capital of France?", text: 60 },
        { key: "answer", label: "the answer", value: "The capital of France is Paris.", text: 60 },
        { key: "again", label: "A asks again", value: "What is the capital of Japan?", text: 60 },
        { key: "b", label: "B asks", value: "What is the opposite of hot?", text: 60 },
        { key: "c", label: "C asks", value: "Count from one to five.", text: 60 },
      ],
      work,
      say({ chats }) {
        const sum = (of) => chats.reduce((all, chat) => all + chat[of], 0);
        const share = (found, tokens) => `${found} of ${tokens} prompt tokens (${Math.round((100 * found) / tokens)} %)`;
        return [...chats.map(({ found, tokens }, i) => [`${NAMES[i]}: saved`, share(found, tokens)]), ["all: saved", share(sum("found"), sum("tokens"))]];
      },
      draw,
    },
  });
})();
