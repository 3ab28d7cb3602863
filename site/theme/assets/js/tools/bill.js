/* The page of ten minutes: what a chat's prompts cost when cached tokens are cheaper. */
(function () {
  "use strict";
  const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
  const dollars = (value) => "$" + value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 });
  const MILLION = 1e6;

  // A message's prompt is the system prompt, all messages up to it, and their answers; all but the message was sent before.
  function work({ system, message, answer, messages, chats, price, share }) {
    const prompts = Array.from({ length: messages }, (_, i) => system + (i + 1) * message + i * answer);
    const sent = chats * prompts.reduce((sum, tokens) => sum + tokens, 0);
    const found = sent - chats * messages * message - system; // the first chat computes the system prompt for all
    const cost = (all, cached) => (price * (all - cached + (cached * share) / 100)) / MILLION;
    const second = system + 2 * message + answer;
    return { prompts, sent, found, without: cost(sent, 0), cached: cost(sent, found), second: cost(second, second - message) / cost(second, 0) };
  }

  // A bar for each message: the tokens that were sent before, and on top the new ones.
  function draw({ message }, { prompts }, wide) {
    const [high, top, bottom] = [150, 20, 130];
    const most = Math.max(...prompts);
    const step = (wide - 8) / prompts.length;
    const y = (tokens) => bottom - ((bottom - top) * tokens) / most;
    const bars = prompts.map((tokens, i) => {
      const old = i ? tokens - message : tokens; // the first message's are all new
      const at = `x="${(4 + i * step).toFixed(1)}" width="${Math.max(1, step * 0.8).toFixed(1)}"`;
      const bar = (kind, from, to) => `<rect class="${kind}" ${at} y="${y(to).toFixed(1)}" height="${(y(from) - y(to)).toFixed(1)}"/>`;
      return i ? bar("old", 0, old) + bar("new", old, tokens) : bar("new", 0, tokens);
    });
    return `<svg viewBox="0 0 ${wide} ${high}" aria-hidden="true">${bars.join("")}<text class="axis" x="4" y="12">prompt tokens of each message, up to ${number(most)}</text>
      <text class="axis" x="4" y="${high - 4}">first message</text><text class="end" x="${wide - 4}" y="${high - 4}">message ${prompts.length}</text></svg>`;
  }

  window.KvTools = Object.assign(window.KvTools || {}, {
    bill: {
      title: "The bill for what you send, lengths in tokens",
      fields: [
        { key: "system", label: "system prompt", value: 11, log: 1, min: 4, max: 16, unit: "" },
        { key: "message", label: "a message", value: 6, log: 1, min: 3, max: 13, unit: "" },
        { key: "answer", label: "an answer", value: 8, log: 1, min: 3, max: 13, unit: "" },
        { key: "messages", label: "messages a chat", value: 20, slide: 1, min: 2, max: 60, show: (value) => `${value}` },
        { key: "chats", label: "chats", value: 1000, min: 1 },
        { key: "price", label: "$ for a million tokens", value: 5, min: 0.01, step: "any" },
        { key: "share", label: "a cached token", value: 10, slide: 1, min: 0, max: 100, show: (value) => `${value} %` },
      ],
      work,
      say: ({ sent, found, without, cached, second }) => [
        ["prompt tokens sent", number(sent)],
        ["of them cached", `${number(found)} (${Math.round((100 * found) / sent)} %)`],
        ["a second message costs", `${number(100 * second)} % of its price without a cache`],
        ["the bill for prompts", `${dollars(without)} → ${dollars(cached)}`],
      ],
      draw,
    },
  });
})();
