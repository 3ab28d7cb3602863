// Course machinery. The page's side of the worker: started by a click, stopped by ending it, never waited for in vain.
(function () {
  "use strict";
  const BASE = document.currentScript.src.replace(/[^/]*$/, "");
  const SILENCE = 60; // seconds without a byte, or with all of them and no Python, after which loading has failed
  const SECONDS = 30; // without a sign of life, once Python is there; a busy machine takes as long for the 10 that a test may run
  const KEY = "kv-course:";

  class Engine {
    constructor() {
      this.waiting = [];
      this.seconds = SECONDS;
      this.silence = SILENCE;
      this.watchers = new Set();
      this.count = 0;
    }

    get isStarted() {
      return !!this.worker;
    }

    start() {
      if (this.worker) return;
      this.isReady = false;
      this.loading(0);
      this.worker = new Worker(BASE + "worker.js", { type: "module" });
      this.worker.onmessage = ({ data }) => this.hear(data);
      this.worker.onerror = (event) => this.fail(event.message || "a file of it did not arrive");
    }

    // A sign of life of a download, with the bytes so far; null: it is over. Without another in time it has failed.
    loading(bytes) {
      clearTimeout(this.patience);
      if (bytes !== null) this.patience = setTimeout(() => this.fail(`nothing came for ${this.silence} seconds`), this.silence * 1000);
      this.watchers.forEach((tell) => tell(bytes));
    }

    // Ask Python; one question at a time. A promise of its answer, parsed.
    ask(kind, question, tell) {
      return new Promise((done, failed) => {
        this.waiting.push({ id: ++this.count, kind, question: JSON.stringify(question), done, failed, tell: tell || (() => {}) });
        this.start();
        if (this.waiting.length === 1) this.send();
      });
    }

    send() {
      const [job] = this.waiting;
      if (job) this.worker.postMessage({ id: job.id, kind: job.kind, question: job.question });
    }

    hear(data) {
      const [job] = this.waiting;
      if (data.ready) this.isReady = true;
      if (data.got) this.loading(data.got);
      if (data.ready || data.landed) this.loading(null);
      if (data.failed) return this.fail(data.failed);
      if (!job || data.id !== job.id) return;
      clearTimeout(this.timer);
      if (data.alive) {
        job.tell(data.alive);
        // importing pytest takes as long as it takes
        if (job.kind !== "prepare") this.timer = setTimeout(() => this.stop("hung"), this.seconds * 1000);
        return;
      }
      this.waiting.shift();
      if (data.error) job.failed(new Error(data.error.trim().split("\n").pop()));
      else job.done(JSON.parse(data.answer));
      if (data.fatal) this.restart();
      this.send();
    }

    // End the worker, whatever it does, and start another. Its question fails with `why`.
    stop(why) {
      const job = this.waiting.shift();
      const words = why === "hung" ? `It did not finish within ${this.seconds} seconds. Python was stopped.` : "Stopped.";
      this.restart();
      if (job) job.failed(Object.assign(new Error(words), { why }));
      this.send();
    }

    restart() {
      clearTimeout(this.timer);
      this.loading(null);
      this.worker.terminate();
      this.worker = null;
      this.start();
    }

    // Python could not be loaded: what was asked fails with an error that can be tried `again`.
    fail(words) {
      clearTimeout(this.timer);
      this.loading(null);
      if (this.worker) this.worker.terminate();
      this.worker = null;
      this.waiting.splice(0).forEach((job) => job.failed(Object.assign(new Error(`Python could not be loaded: ${words}.`), { again: true })));
    }
  }

  function element(tag, attrs, ...children) {
    const node = document.createElement(tag);
    for (const name in attrs) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), attrs[name]);
      else if (attrs[name] !== false && attrs[name] !== undefined) node.setAttribute(name, attrs[name] === true ? "" : attrs[name]);
    }
    node.append(...children);
    return node;
  }

  // How much of a download has come, while it lasts. sizes: of the page; parts: the names of what is loaded. `watch` is
  // given a function that is then called with the bytes so far, or with null.
  function meter(sizes, parts, watch) {
    const sum = (ending) => parts.reduce((total, part) => total + Number(sizes[part + ending]), 0);
    const bar = element("progress", { max: "1", value: "0", "aria-label": "Downloaded" });
    const words = element("span", {});
    const box = element("p", { class: "kv-live-meter", hidden: true }, bar, words);
    watch((bytes) => {
      box.hidden = bytes === null;
      bar.value = bytes ? Math.max(bar.value, Math.min(1, bytes / 1e6 / sum("_unpacked"))) : 0;
      words.textContent = bar.value < 0.98 ? `${(bar.value * sum("")).toFixed(1)} of ${sum("").toFixed(1)} MB` : "All of it is here; it starts …";
    });
    return box;
  }

  // Let a button that needs Python say what a press loads, how far that is, and nothing once it is there.
  function announce(button, words, sizes) {
    const tell = (bytes) => {
      const part = Math.min(99, Math.floor((100 * bytes) / 1e6 / sizes.lab_unpacked));
      if (engine.isReady) button.textContent = words;
      else button.textContent = bytes ? `${words} (loading Python, ${part} %)` : `${words} (loads Python, ${sizes.lab} MB)`;
    };
    engine.watchers.add(tell);
    tell(null);
  }

  // An error in words, with a button if what failed can be tried again.
  function trouble(error, again) {
    return error.again ? [error.message, " ", element("button", { type: "button", class: "kv-live-again", onclick: again }, "Try again")] : [error.message];
  }

  // Put an address into the clipboard, and say where it is now.
  async function copied(address, what) {
    try {
      await navigator.clipboard.writeText(address);
      return `The address of this ${what} is copied.`;
    } catch {
      return `The ${what} is in the address of this page.`;
    }
  }

  // Why nothing can run here, in a sentence; "" if it can.
  function obstacle(sizes) {
    if (location.protocol === "file:") return "This runs only in pages that come from a server: type python -m http.server in the site's folder and open http://localhost:8000.";
    if (!sizes.lab) return "This copy of the site was built without Python. In the repository, run python -m scripts.website.live and build the site again.";
    if (!window.Worker || !window.WebAssembly) return "This needs a browser with workers and WebAssembly.";
    return "";
  }

  const store = {
    get: (key) => {
      try {
        return JSON.parse(localStorage.getItem(KEY + key));
      } catch {
        return null;
      }
    },
    set: (key, value) => {
      try {
        if (value === null) localStorage.removeItem(KEY + key);
        else localStorage.setItem(KEY + key, JSON.stringify(value));
      } catch {} // a private window may refuse
    },
  };

  const engine = new Engine();
  window.KvLive = { announce, copied, engine, element, meter, obstacle, store, trouble };
})();
