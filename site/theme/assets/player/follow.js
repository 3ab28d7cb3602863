// Course machinery. The picture beside a text: each step of the text shows its frame of a trace while it is read.
//
// scripts/website/follow.py writes such a section: an empty box and steps that name their frame. Here the box gets a
// player of its own. Scrolling never moves by itself: the picture follows the text, never the text the picture.
(function () {
  "use strict";
  const KV = window.KvPlayer;
  const { element } = KV;
  const READ = 0.35; // of the window's height: where a reader reads beside the picture
  const HIGHEST = 0.63; // of the picture, so that all of it is in sight while the first step is read
  const SINKS = 400; // pixels before its end
  const EDGE = 6; // pixels around the picture in its stage
  const PAPER = 600; // a still's width
  const wide = window.matchMedia("(min-width: 1200px)");

  class Section {
    constructor(box, trace) {
      this.box = box;
      this.trace = trace;
      this.beside = box.querySelector(".kv-beside");
      this.steps = [...box.querySelectorAll(".kv-step")];
      this.steps.forEach((step, number) => this.prepare(step, number));
      box.follow = this;
      const near = new IntersectionObserver(([{ isIntersecting }]) => isIntersecting && (near.disconnect(), this.build()), { rootMargin: "800px" });
      near.observe(box); // all frames are measured for it, which a page need not wait for
    }

    build() {
      const { box } = this;
      this.fill();
      const scrolled = () => (this.asked ||= requestAnimationFrame(() => this.read()));
      new IntersectionObserver(([{ isIntersecting }]) => {
        const act = isIntersecting ? "addEventListener" : "removeEventListener";
        document.documentElement.classList.toggle("kv-following", isIntersecting);
        window[act]("scroll", scrolled, { passive: true });
        scrolled();
      }).observe(box);
      window.addEventListener("resize", () => (this.player.layOut(), scrolled()));
    }

    fill() {
      const link = element("a", { "data-code": this.box.dataset.code, "data-start": this.steps[0].dataset.frame });
      this.beside.append(link);
      this.player = new KV.Player(link, this.trace, { inside: (player) => this.room(player) });
      const { figure, words, backButton, playButton, nextButton, number } = this.player;
      figure.classList.add("kv-compact");
      figure.append(element("div", { class: "kv-steer" }, backButton, playButton, nextButton, number));
      figure.removeAttribute("data-trace"); // the page's player of this trace is another one
      figure.setAttribute("aria-label", `${this.trace.title}, as the text goes on`);
      words.setAttribute("aria-live", "off"); // the text says it
      this.player.layOut();
      this.show(this.steps[0]);
      new MutationObserver(() => this.stepped()).observe(figure, { attributeFilter: ["data-index"] });
    }

    // Beside the text all frames share a layout, so that the controls stay where they are. Above it the box is as high
    // as it is, and each frame is drawn as large as it can be.
    room({ stage, figure }) {
      const width = stage.clientWidth - 2 * EDGE;
      if (!wide.matches) return [width, stage.clientHeight - 2 * EDGE, true];
      const foot = figure.querySelector(".kv-foot").offsetHeight;
      return [width, HIGHEST * (window.innerHeight - KV.header()) - foot - 2 * EDGE - 2, false];
    }

    // A step can be pointed at, and reached by keyboard.
    prepare(step, number) {
      const mark = element("button", { type: "button", class: "kv-here", "aria-label": `Step ${number + 1}: show it in the picture` });
      step.prepend(mark);
      step.addEventListener("click", () => window.getSelection().isCollapsed && this.show(step));
      step.addEventListener("focusin", () => {
        this.until = performance.now() + 300; // the browser may scroll to what has the focus
        this.show(step);
      });
    }

    // The height at which a reader reads. Towards the end it sinks, so that the last step is shown while all of the picture is.
    get line() {
      const header = KV.header();
      const bottom = this.beside.offsetHeight + header;
      if (!wide.matches) return bottom + 0.3 * (window.innerHeight - bottom);
      const line = header + READ * (window.innerHeight - header);
      const sinks = Math.min(SINKS, Math.max(1, this.box.offsetHeight - this.beside.offsetHeight));
      const left = Math.min(sinks, Math.max(0, this.box.getBoundingClientRect().bottom - bottom - 24));
      return line + Math.max(0, bottom - line) * (1 - left / sinks);
    }

    // What is read now is shown, once: a step that was chosen otherwise stays until another one is read.
    read() {
      this.asked = 0;
      const { line } = this;
      const step = this.steps.findLast((one) => one.getBoundingClientRect().top <= line) || this.steps[0];
      if (step === this.at) return;
      this.at = step;
      if (!(performance.now() < this.until)) this.show(step);
    }

    show(step) {
      if (!this.player) return;
      this.player.pause();
      this.mark(step);
      if (this.player.index !== Number(step.dataset.frame)) this.player.show(Number(step.dataset.frame));
      this.player.figure.classList.remove("by-hand");
    }

    mark(step) {
      for (const one of this.steps) {
        one.classList.toggle("now", one === step);
        if (one === step) one.setAttribute("aria-current", "step");
        else one.removeAttribute("aria-current");
      }
      this.now = step;
    }

    // The player moved by itself or by hand: where no step describes its frame, it needs its words.
    stepped() {
      const { index, figure } = this.player;
      if (index === Number(this.now?.dataset.frame)) return;
      const step = this.steps.find((one) => Number(one.dataset.frame) === index);
      this.mark(step);
      figure.classList.toggle("by-hand", !step);
    }

    still(index) {
      const { width, height, defs, lines } = KV.picture(this.trace, index, PAPER);
      const still = element("div", { class: "kv-still kv-drawn" });
      still.innerHTML = `<svg class="kv-art" viewBox="0 0 ${width} ${height}" aria-hidden="true"><defs>${defs}</defs>${lines.join("")}</svg>`;
      return still;
    }

    print() {
      for (const step of this.steps) step.prepend(this.still(Number(step.dataset.frame)));
    }
  }

  async function start(box) {
    await KV.load(new URL(box.dataset.file, location.href).href);
    const trace = Object.values(window.KV_TRACES).find((one) => one.file.endsWith(`/${box.dataset.file}`));
    await KV.load(`${KV.base}views/${trace.kind}.js`);
    return new Section(box, trace);
  }

  const boxes = [...document.querySelectorAll(".kv-follow")];
  boxes.forEach((box) => start(box).catch(() => box.classList.add("kv-alone")));
  window.addEventListener("beforeprint", () => boxes.forEach((box) => box.follow?.print()));
  window.addEventListener("afterprint", () => document.querySelectorAll(".kv-drawn").forEach((still) => still.remove()));
})();
