// Course machinery. The pocket model in the page: it continues a reader's prompt, in a pool that the lesson's allocator fills.
//
// A worker computes (pocket/), Python says which slot each token gets, the player draws the pool.
(function () {
  "use strict";
  const BASE = document.currentScript.src.replace(/[^/]*$/, "");
  const { engine, element, obstacle } = window.KvLive;
  const PROMPTS = ["The capital of France is", "The opposite of hot is", "Once upon a time"];
  const NAMES = "ABCDEF";
  const DRAW_EVERY = 150; // milliseconds

  // The model's worker; a promise for each question.
  class Runner {
    constructor() {
      this.asked = new Map();
      this.count = 0;
      this.worker = new Worker(BASE + "pocket/worker.js", { type: "module" });
      this.worker.onmessage = ({ data }) => this.hear(data);
      this.worker.onerror = (event) => this.fail(new Error(event.message || "The model's worker could not be loaded."));
    }

    ask(kind, question) {
      return new Promise((done, failed) => {
        this.asked.set(++this.count, { done, failed });
        this.worker.postMessage({ id: this.count, kind, ...question });
      });
    }

    hear({ id, answer, error }) {
      const { done, failed } = this.asked.get(id);
      this.asked.delete(id);
      if (error) failed(new Error(error));
      else done(answer);
    }

    fail(error) {
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
      const go = element("button", { type: "button", class: "kv-live-go", onclick: () => this.open(), disabled: !!reason }, "Run the model here");
      const price = reason || `${(Number(sizes.lab) + Number(sizes.model)).toFixed(1)} MB, once. What you type stays in your browser.`;
      this.first = element("p", { class: "kv-live-first" }, go, element("span", {}, price));
      box.replaceChildren(this.first);
    }

    async open() {
      this.first.remove();
      this.box.append(this.panel());
      this.prompt.focus();
      await this.generate();
    }

    panel() {
      const button = (words, act, more) => element("button", { type: "button", onclick: act, ...more }, words);
      this.prompt = element("input", { type: "text", maxlength: "160", value: PROMPTS[0] });
      this.prompt.addEventListener("keydown", (event) => {
        event.stopPropagation();
        if (event.key === "Enter") this.generate();
      });
      const tryIt = (words) => button(words, () => ((this.prompt.value = words), this.generate()));
      this.goButton = button("Continue it", () => this.generate(), { class: "kv-live-go" });
      this.stopButton = button("Stop", () => (this.isStopped = true), { hidden: true });
      this.answer = element("p", { class: "kv-model-text" });
      this.say = element("p", { class: "kv-live-say", role: "status" });
      this.figure = element("div", {});
      const label = element("label", { class: "kv-live-prompt" }, element("span", {}, "Prompt"), this.prompt);
      const examples = element("div", { class: "kv-live-row kv-live-acts", role: "group", "aria-label": "Prompts to try" }, ...PROMPTS.map(tryIt));
      const panel = element("div", { class: "kv-live-panel", role: "group", "aria-label": "The pocket model" },
        label, element("div", { class: "kv-live-row" }, this.goButton, this.stopButton), examples, this.answer, this.say);
      this.box.after(this.figure);
      return panel;
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
        this.say.textContent = error.message;
        this.texts = this.texts.filter(({ name }) => names.includes(name)); // what failed is not in the pool
      }
      this.busy(false);
    }

    busy(is) {
      this.isBusy = is;
      this.isStopped = false;
      if (is) this.say.textContent = "";
      this.goButton.disabled = is;
      this.stopButton.hidden = !is;
      this.box.toggleAttribute("aria-busy", is);
    }

    async load() {
      if (this.runner) return;
      this.say.textContent = "The model and Python are loading …";
      engine.start();
      const runner = new Runner();
      this.ends = (await runner.ask("load", { slots: this.about.slots })).ends;
      this.runner = runner;
    }

    // Continue a prompt greedily, until an end token, or the reader, ends it.
    async run(prompt) {
      if (this.texts.length === NAMES.length) this.texts = [];
      const ids = await this.runner.ask("encode", { text: prompt });
      const text = { name: NAMES[this.texts.length], ids, prompt: ids.length, fed: ids.length };
      text.tokens = await Promise.all(ids.map((id) => this.shown(id)));
      this.texts.push(text);
      for (let start = 0, more = true; more; start = text.fed++) {
        const slots = await this.slots();
        if (!text.began) this.say.textContent = "Computing …";
        text.began ||= performance.now();
        const next = await this.runner.ask("step", { tokens: text.ids.slice(start), start, slots });
        text.ids.push(next);
        text.tokens.push(await this.shown(next));
        await this.tell(text, prompt);
        more = !this.isStopped && !this.ends.includes(next) && text.ids.length - text.prompt < this.about.most;
      }
      text.fed--; // the last one has been chosen and not been fed
      const seconds = (performance.now() - text.began) / 1000;
      const isCut = text.ids.length - text.prompt === this.about.most && !this.ends.includes(text.ids.at(-1));
      this.say.textContent = `${text.fed} tokens computed, ${Math.round(text.fed / seconds)} a second in this browser.`
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
      Object.assign(player, { trace: this.trace, index: last, width: 0 }); // lays out and draws again
      player.slider.max = last;
      player.layOut();
    }
  }

  const begin = () => document.querySelectorAll(".kv-model").forEach((box) => (box.pocket = new Pocket(box)));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
