// Course machinery. The pocket model in the page: it continues a reader's prompt, in a pool that the lesson's allocator fills.
//
// A worker computes (pocket/), Python says which slot each token gets, the player draws the pool.
(function () {
  "use strict";
  const BASE = document.currentScript.src.replace(/[^/]*$/, "");
  const { copied, engine, element, meter, obstacle, trouble } = window.KvLive;
  const PROMPTS = ["What is the capital of Japan?", "The opposite of hot is", "Once upon a time"];
  const MOST_TEXT = 160; // characters of a prompt
  // A question is asked as in a chat: the model was trained to answer there, and after a bare question it says nothing.
  const asChat = (words) => `<|im_start|>user\n${words}<|im_end|>\n<|im_start|>assistant\n`; // as mini_engine/pocket
  const isQuestion = (words) => /\?\s*$/.test(words) && !words.includes("<|im_start|>");
  const NAMES = "ABCDEF";
  const DRAW_EVERY = 150; // milliseconds

  // The model's worker; a promise for each question.
  class Runner {
    // loaded: called with the bytes of its files that have come.
    constructor(loaded) {
      this.loaded = loaded;
      this.asked = new Map();
      this.count = 0;
      this.worker = new Worker(BASE + "pocket/worker.js", { type: "module" });
      this.worker.onmessage = ({ data }) => this.hear(data);
      this.worker.onerror = (event) => this.fail(new Error(event.message || "a file of its code did not arrive"));
      this.wait();
    }

    // Loading fails if nothing comes for as long as the engine waits, too.
    wait() {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.fail(new Error(`nothing came for ${engine.silence} seconds`)), engine.silence * 1000);
    }

    ask(kind, question) {
      return new Promise((done, failed) => {
        this.asked.set(++this.count, { done, failed });
        this.worker.postMessage({ id: this.count, kind, ...question });
      });
    }

    hear({ id, answer, error, got, failed: broken }) {
      if (broken) return this.fail(new Error(broken));
      if (got) return this.loaded(got), this.wait();
      if (!this.asked.has(id)) return;
      clearTimeout(this.timer);
      const { done, failed } = this.asked.get(id);
      this.asked.delete(id);
      if (error) failed(new Error(error));
      else done(answer);
    }

    fail({ message }) {
      clearTimeout(this.timer);
      this.worker.terminate();
      const error = Object.assign(new Error(`The model could not be loaded: ${message}.`), { again: true });
      this.asked.forEach(({ failed }) => failed(error));
      this.asked.clear();
    }
  }

  class Pocket {
    constructor(box) {
      this.box = box;
      this.about = JSON.parse(box.dataset.about);
      this.texts = []; // in the pool, the last one being continued
      const { sizes } = this.about;
      const reason = obstacle(sizes);
      const asked = new URLSearchParams(location.search);
      this.first = asked.get("model") === "pocket" && (asked.get("prompt") || "").slice(0, MOST_TEXT);
      this.loaded = { python: 0, model: 0 }; // bytes; null for what is all there
      this.price = element("p", { class: "kv-live-price" }, reason || `${(Number(sizes.lab) + Number(sizes.model)).toFixed(1)} MB, once. What you type stays in your browser.`);
      box.replaceChildren(this.panel(!reason));
      engine.watchers.add((bytes) => this.arrived("python", bytes));
    }

    panel(canRun) {
      const button = (words, act, more) => element("button", { type: "button", onclick: act, disabled: !canRun, ...more }, words);
      this.prompt = element("input", { type: "text", maxlength: MOST_TEXT, value: this.first || PROMPTS[0] });
      this.prompt.addEventListener("keydown", (event) => {
        event.stopPropagation();
        if (event.key === "Enter") this.generate();
      });
      const tryIt = (words) => button(words, () => ((this.prompt.value = words), this.generate()));
      this.goButton = button(this.first ? "Run this prompt" : "Run the model here", () => this.generate(), { class: "kv-live-go" });
      this.stopButton = button("Stop", () => (this.isStopped = true), { hidden: true });
      this.answer = element("p", { class: "kv-model-text" });
      this.say = element("p", { class: "kv-live-say", role: "status" });
      this.figure = element("div", {});
      const label = element("label", { class: "kv-live-prompt" }, element("span", {}, "Prompt"), this.prompt);
      const examples = element("div", { class: "kv-live-row kv-live-acts", role: "group", "aria-label": "Prompts to try" }, ...PROMPTS.map(tryIt));
      const panel = element("div", { class: "kv-live-panel", role: "group", "aria-label": "The pocket model" },
        label, element("div", { class: "kv-live-row" }, this.goButton, this.stopButton, button("Copy link", () => this.copy())), this.price, examples, this.answer, this.say,
        meter(this.about.sizes, ["lab", "model"], (tell) => (this.tellLoaded = tell)));
      this.box.after(this.figure);
      return panel;
    }

    get address() {
      const url = new URL(location.href);
      url.search = new URLSearchParams({ model: "pocket", prompt: this.prompt.value });
      url.hash = this.box.id;
      return url.href;
    }

    async copy() {
      history.replaceState(null, "", this.address);
      this.say.textContent = await copied(this.address, "prompt");
    }

    arrived(part, bytes) {
      this.loaded[part] = bytes;
      const whole = { python: this.about.sizes.lab_unpacked, model: this.about.sizes.model_unpacked };
      const sum = Object.entries(this.loaded).reduce((total, [name, got]) => total + (got ?? whole[name] * 1e6), 0);
      const isLoading = this.isBusy && !(this.runner && this.loaded.python === null);
      this.tellLoaded(isLoading ? sum : null);
      const share = Math.min(99, Math.floor((100 * sum) / 1e6 / (Number(whole.python) + Number(whole.model))));
      if (this.isBusy) this.goButton.textContent = isLoading ? `Loading … ${share} %` : "Continue it";
    }

    // ---- running ----

    async generate() {
      if (this.isBusy || !this.prompt.value) return;
      this.busy(true);
      const names = this.texts.map(({ name }) => name);
      try {
        await this.load();
        await this.run(this.prompt.value);
      } catch (error) {
        this.tellLoaded(null);
        this.say.replaceChildren(...trouble(error, () => this.generate()));
        this.texts = this.texts.filter(({ name }) => names.includes(name)); // what failed is not in the pool
      }
      this.busy(false);
    }

    busy(is) {
      this.isBusy = is;
      this.price.remove();
      this.goButton.textContent = "Continue it";
      this.isStopped = false;
      if (is) this.say.textContent = "";
      this.goButton.disabled = is;
      this.stopButton.hidden = !is;
      this.box.toggleAttribute("aria-busy", is);
    }

    async load() {
      if (this.runner) return;
      this.loaded.model = 0;
      this.say.textContent = "The model and Python are loading …";
      engine.start();
      const runner = new Runner((bytes) => this.arrived("model", bytes));
      this.ends = (await runner.ask("load", { slots: this.about.slots })).ends;
      this.runner = runner;
      this.arrived("model", null);
    }

    // Continue a prompt greedily, until an end token, or the reader, ends it.
    async run(prompt) {
      if (this.texts.length === NAMES.length) this.texts = [];
      const isChat = isQuestion(prompt);
      const ids = await this.runner.ask("encode", { text: isChat ? asChat(prompt) : prompt });
      const text = { name: NAMES[this.texts.length], ids, prompt: ids.length, fed: ids.length };
      text.tokens = await Promise.all(ids.map((id) => this.shown(id)));
      this.texts.push(text);
      for (let start = 0, more = true; more; start = text.fed++) {
        const slots = await this.slots();
        if (!text.began) {
          this.say.textContent = "Computing …";
          this.box.scrollIntoView({ block: "nearest" }); // where the answer appears
        }
        text.began ||= performance.now();
        const next = await this.runner.ask("step", { tokens: text.ids.slice(start), start, slots });
        text.ids.push(next);
        text.tokens.push(await this.shown(next));
        await this.tell(text, isChat ? prompt + " " : prompt);
        more = !this.isStopped && !this.ends.includes(next) && text.ids.length - text.prompt < this.about.most;
      }
      text.fed--; // the last one has been chosen and not been fed
      const seconds = (performance.now() - text.began) / 1000;
      const isCut = text.ids.length - text.prompt === this.about.most && !this.ends.includes(text.ids.at(-1));
      this.say.textContent = `${text.fed} tokens computed, ${Math.round(text.fed / seconds)} a second in this browser.`
        + (isChat ? " A question is fed in the chat template, whose tokens count, too." : "")
        + (this.ends.includes(text.ids[text.prompt]) ? " It has nothing to add: it continues sentences, and answers questions that end with a question mark. Try one of the three above." : "")
        + (isCut ? ` An answer ends after ${this.about.most} tokens here.` : "");
      this.result = { prompt: ids.slice(0, text.prompt), answer: ids.slice(text.prompt) };
      await this.slots();
      this.draw();
    }

    // Ask Python where the tokens lie; it gives new ones a slot.
    async slots() {
      const texts = this.texts.map(({ name, tokens, prompt, fed }) => ({ name, tokens, prompt, fed }));
      const found = await engine.ask("pocket", { texts });
      if (found.error) throw new Error(found.error);
      this.trace = found.trace;
      if (performance.now() - (this.drawn || 0) > DRAW_EVERY) this.draw();
      return found.slots;
    }

    // A token's text, with signs for what cannot be seen.
    async shown(id) {
      const text = await this.runner.ask("decode", { ids: [id] });
      return text.replace(/\n/g, "⏎").trim() || "␣";
    }

    async tell(text, prompt) {
      const answer = text.ids.slice(text.prompt).filter((id) => !this.ends.includes(id));
      this.answer.replaceChildren(prompt, element("strong", {}, await this.runner.ask("decode", { ids: answer })));
    }

    // ---- the picture ----

    async draw() {
      this.drawn = performance.now();
      const KV = window.KvPlayer;
      if (!KV.views.pool) await KV.load(`${KV.base}views/pool.js`);
      const last = this.trace.frames.length - 1;
      this.figure.dataset.start = last;
      const player = this.figure.player;
      if (!player) {
        this.figure.dataset.code = JSON.stringify(this.about.code);
        this.figure = new KV.Player(this.figure, this.trace).figure;
        this.figure.classList.add("kv-live");
        return;
      }
      player.pause();
      Object.assign(player, { trace: this.trace, index: last });
      player.slider.max = last;
      player.layOutAgain();
    }
  }

  const begin = () => document.querySelectorAll(".kv-model").forEach((box) => (box.pocket = new Pocket(box)));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
