// Course machinery. Lesson 7's picture: the engine's thread with its inbox and blocks, and the event loop's clients.
(function () {
  "use strict";
  const STATUS = {
    asks: "asks",
    reads: "reads at once",
    slow: "has yet to read",
    gone: "has left",
    done: "has its answer",
  };

  // Tokens first … of a client's answer in a row, as boxes with their numbers.
  function tokens(pen, name, first, count, x, y, size, style, last) {
    for (let i = 0; i < count; i++) {
      const [key, left] = [`${name}-${first + i}`, x + i * (size + 2)];
      pen.rect(key, left, y, size, 20, `${style} ${name.toLowerCase()}`);
      pen.text(key, left + size / 2, y + 14.5, first + i, "small mid num");
      if (first + i === last) pen.rect(key + "-new", left - 2, y - 2, size + 4, 24, "ring");
    }
  }

  // The places that a client's tokens go through, from right to left: [its tokens there, where that begins, their style].
  function lane(pen, name, client, frame, places, y, size) {
    const read = client.read.reduce((sum, count) => sum + count, 0);
    const made = frame.made.includes(name) ? read + client.unread + client.waits - 1 : -1;
    pen.badge("client-" + name, 14, y + 10, name);
    let first = 0;
    client.read.forEach((count, i) => {
      const x = places.read[0] + first * (size + 2);
      if (count > 1) pen.rect(`event-${name}-${i}`, x - 2, y - 2, count * (size + 2) + 2, 24, "plain");
      tokens(pen, name, first, count, x, y, size, "held", made);
      first += count;
    });
    const [socket, style] = [places.socket, client.status === "gone" ? "empty" : "held"]; // what is left for a client that has gone
    if (client.unread > 1) pen.rect("socket-event-" + name, socket[0] - 3, y + socket[1] - 3, client.unread * (size + 2) + 4, 26, "plain");
    tokens(pen, name, first, client.unread, socket[0], y + socket[1], size, style, made);
    const box = places.mailbox;
    pen.rect("mailbox-" + name, box[0] - 5, y + box[1] - 5, box[2], 30, "free");
    tokens(pen, name, first + client.unread, client.waits, box[0], y + box[1], size, style, made);
    const [x, down] = places.words;
    pen.text("status-" + name, x, y + down, STATUS[client.status], "small muted" + (places.atEnd ? " end" : ""));
  }

  function engine(pen, frame, scene, x, y, room) {
    const pitch = Math.min(16, (room - 16) / scene.blocks);
    pen.text("engine", x, y + 14, "engine's thread", "strong");
    pen.text("step", x + room - 16, y + 14, "step " + frame.step, "label muted num end");
    pen.text("inbox", x, y + 42, "inbox", "label muted");
    pen.rect("inbox-box", x + 40, y + 26, room - 56, 26, "free");
    const wide = (room - 62) / scene.clients.length;
    frame.inbox.forEach(([kind, name], i) => {
      const key = `${kind}-${name}`;
      pen.rect(key, x + 43 + i * wide, y + 29, wide - 3, 20, (kind === "abort" ? "wish " : "cell ") + name.toLowerCase());
      pen.text(key, x + 43 + i * wide + (wide - 3) / 2, y + 43.5, `${kind} ${name}`, "small mid");
    });
    const held = Object.keys(frame.held).flatMap((name) => Array(frame.held[name]).fill(name.toLowerCase()));
    pen.text("blocks", x, y + 72, `blocks: ${held.length} held, ${scene.blocks - held.length} free`, "label muted num");
    for (let i = 0; i < scene.blocks; i++) {
      pen.rect("block-" + i, x + i * pitch, y + 80, pitch - 3, 16, held[i] ? "held " + held[i] : "free");
    }
    return y + 104;
  }

  function sideBySide(pen, frame, scene) {
    const right = pen.width - 204;
    const high = 62 + scene.clients.length * 54;
    pen.rect("loop", 0, 0, right - 22, high, "now");
    pen.rect("thread", right, 0, 204, high, "now");
    pen.text("loop", 10, 20, "event loop", "strong");
    const size = Math.min(20, (right - 170) / 14 - 2);
    const places = { read: [34, 0], words: [34, 36] };
    places.socket = [34 + 9.3 * (size + 2), 0];
    places.mailbox = [right - 34 - 3 * (size + 2), 0, 3 * (size + 2) + 8];
    pen.text("head-read", 34, 44, "client has read", "label muted");
    pen.text("head-socket", places.socket[0], 44, "in its socket", "label muted");
    pen.text("head-mailbox", places.mailbox[0] - 5, 44, "mailbox", "label muted");
    scene.clients.forEach((name, i) => {
      const y = 56 + i * 54;
      if (frame.made.includes(name)) pen.path("put-" + name, right - 2, y + 10, "M0 0H-18M-13 -4L-18 0L-13 4", "arrow");
      lane(pen, name, frame.clients[i], frame, places, y, size);
    });
    engine(pen, frame, scene, right + 12, 6, 192);
    scene.clients.forEach((name, i) => {
      const y = 134 + i * 26;
      const count = frame.computed[i];
      pen.badge("computed-" + name, right + 23, y + 10, name);
      pen.text("computed-count-" + name, right + 40, y + 14.5, `${count} ${count === 1 ? "token" : "tokens"} computed`, "label num");
    });
    return high;
  }

  function stacked(pen, frame, scene) {
    const size = 17;
    pen.rect("thread", 0, 0, pen.width, 110, "now");
    const low = engine(pen, frame, scene, 10, 4, pen.width - 8) + 12;
    pen.rect("loop", 0, low, pen.width, 30 + scene.clients.length * 62, "now");
    pen.text("loop", 10, low + 18, "event loop", "strong");
    const mailbox = pen.width - 3 * (size + 2) - 8;
    const places = { read: [34, 0], words: [pen.width - 6, 13], atEnd: true, socket: [76, 29], mailbox: [mailbox, 29, 3 * (size + 2) + 8] };
    scene.clients.forEach((name, i) => {
      const y = low + 32 + i * 62;
      lane(pen, name, frame.clients[i], frame, places, y, size);
      pen.text("head-socket-" + name, 34, y + 43, "socket", "small muted");
      pen.text("head-mailbox-" + name, mailbox - 54, y + 43, "mailbox", "small muted");
    });
    return low + 30 + scene.clients.length * 62;
  }

  window.KvPlayer.views.mailboxes = function (pen, frame, scene) {
    pen.height = pen.width >= 560 ? sideBySide(pen, frame, scene) : stacked(pen, frame, scene);
  };
})();
