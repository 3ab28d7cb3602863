/* Lesson 6's tool: typed text as UTF-8 bytes, the pocket model's tokens over them, and what mini_engine/engine/
   detokenizer.py has shown after each token. */
(function () {
  "use strict";
  const DATA = window.KvToolData_bytes;
  const RANKS = new Map(DATA.merges.map(([left, right], rank) => [`${left} ${right}`, rank]));
  const BYTES = []; // of each id
  DATA.bytes.forEach((id, byte) => (BYTES[id] = [byte]));
  DATA.merges.forEach(([left, right], rank) => (BYTES[256 + rank] = [...BYTES[left], ...BYTES[right]]));
  const MARKS = Object.keys(DATA.special);
  // Pieces of text that are never merged with each other; \s as the tokenizer's Unicode means it.
  const PIECES =
    /'(?:[sſ]|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*|\p{White_Space}*[\r\n]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/giu;

  // Merge the pair with the lowest rank until no pair is known.
  function merge(ids) {
    for (;;) {
      let [best, at] = [Infinity, -1];
      for (let i = 0; i + 1 < ids.length; i++) {
        const rank = RANKS.get(`${ids[i]} ${ids[i + 1]}`);
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return ids;
      ids.splice(at, 2, 256 + best);
    }
  }

  function encode(text) {
    const marked = text.split(/(<\|(?:endoftext|im_start|im_end)\|>)/);
    return marked.flatMap((part) => {
      if (MARKS.includes(part)) return [DATA.special[part]];
      const pieces = part.match(PIECES) || [];
      return pieces.flatMap((piece) => merge([...new TextEncoder().encode(piece)].map((byte) => DATA.bytes[byte])));
    });
  }

  // Each token with its bytes, and the text that it completes.
  function work({ text }) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const tokens = encode(text).map((id) => {
      const bytes = BYTES[id] || [];
      return { id, bytes, text: bytes.length ? decoder.decode(new Uint8Array(bytes), { stream: true }) : "" };
    });
    return { tokens, characters: [...text].length };
  }

  const escape = (text) => text.replace(/[&<>]/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[char]);
  const hex = (bytes) => bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");

  function draw(values, { tokens }) {
    const cards = tokens.map(({ id, bytes, text }) => {
      const shown = text ? escape(text.replace(/ /g, "␣").replace(/\n/g, "↵")) : bytes.length ? "held back" : "hidden";
      return `<div role="listitem"${text ? "" : ' class="held"'}><span>${id}</span><code>${hex(bytes) || "–"}</code><b>${shown}</b></div>`;
    });
    return `<p>token, bytes, and the text that it completes:</p><div class="kv-tool__tokens" role="list">${cards.join("")}</div>`;
  }

  window.KvTools = Object.assign(window.KvTools || {}, {
    bytes: {
      title: "Which bytes, which tokens, and what waits?",
      fields: [{ key: "text", label: "type something", value: "A café: 5 €, 😀", text: 40 }],
      work,
      say({ tokens, characters }) {
        const held = tokens.filter(({ bytes, text }) => bytes.length && !text).length;
        const size = tokens.reduce((sum, { bytes }) => sum + bytes.length, 0);
        return [
          ["characters, bytes, tokens", `${characters}, ${size}, ${tokens.length}`],
          ["tokens after which nothing can be shown", held ? `${held}: their bytes wait for the rest of a character` : "none"],
        ];
      },
      draw,
    },
  });
})();
