// Course machinery. The page's side of the worker: started by a click, stopped by ending it, never waited for in vain.
(function () {
  "use strict";
  const BASE = document.currentScript.src.replace(/[^/]*$/, "");
  const SECONDS = 20; // without a sign of life, once Python is there; a busy machine takes as long for 5 of its own
  const KEY = "kv-course:";

  class Engine {
    constructor() {
      this.waiting = [];
      this.seconds = SECONDS;
      this.count = 0;
    }

    get isStarted() {
      return !!this.worker;
    }

    start() {
      if (this.worker) return;
      this.isReady = false;
      this.worker = new Worker(BASE + "worker.js", { type: "module" });
      this.worker.onmessage = ({ data }) => this.hear(data);
      this.worker.onerror = (event) => this.fail(event.message || "The worker could not be loaded.");
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
      const words = why === "hung" ? `It did not finish within ${this.seconds} seconds; most likely a loop never ends. Python was stopped.` : "Stopped.";
      this.restart();
      if (job) job.failed(Object.assign(new Error(words), { why }));
      this.send();
    }

    restart() {
      clearTimeout(this.timer);
      this.worker.terminate();
      this.worker = null;
      this.start();
    }

    // Python could not be loaded.
    fail(words) {
      clearTimeout(this.timer);
      if (this.worker) this.worker.terminate();
      this.worker = null;
      this.waiting.splice(0).forEach((job) => job.failed(new Error(`Python could not be loaded: ${words}`)));
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

  window.KvLive = { engine: new Engine(), element, obstacle, store };
})();
