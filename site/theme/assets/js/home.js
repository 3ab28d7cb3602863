/* The front page: the race in recorded time, a first task, and a command to copy. All are complete without this script. */
(function () {
  "use strict";

  // ---- the command ----
  const box = document.querySelector(".kv-hero__commands");
  const copy = box.querySelector("button");
  copy.hidden = !navigator.clipboard;
  copy.addEventListener("click", async function () {
    await navigator.clipboard.writeText(box.querySelector("code").textContent);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });

  // ---- lesson 0's first task: its known answers, as lessons/l0_the_loop/answers.toml has them ----
  const touch = document.querySelector(".kv-touch");
  const said = touch.querySelector("output");
  const ARGMAX = String.raw`(?:logits\.argmax\((?:dim=)?(?:-1|0)?\)|torch\.argmax\(logits(?:,(?:dim=)?(?:-1|0))?\)|logits\.max\((?:dim=)?(?:-1|0)\)(?:\.indices|\[1\])|logits\.topk\(1\)\.indices)`;
  const known = [
    [`int\\(${ARGMAX}\\)|${ARGMAX}\\.item\\(\\)`, "Right: the id with the largest logit, as a plain int. You have the first line of an engine.", true],
    [ARGMAX, "Almost: this is a tensor with one element. Return a Python int."],
    [String.raw`.*abs\(.*`, "Not the largest absolute value: a logit of -9 means that the token is unlikely."],
    [String.raw`.*argmin.*`, "That is the smallest one. Greedy decoding takes the id with the largest logit."],
    [String.raw`(?:int|float)?\(?(?:logits\.max\(\)|max\(logits\))\)?(?:\.item\(\))?`, "That is the logit, not its id. Which method returns the index of the largest element?"],
  ];
  touch.querySelector("button").disabled = false;
  touch.addEventListener("submit", function (event) {
    event.preventDefault();
    const typed = touch.elements.answer.value.replace(/^\s*return\b|\s/g, "");
    const found = known.find(([pattern]) => new RegExp(`^(?:${pattern})$`).test(typed));
    touch.classList.toggle("right", Boolean(found && found[2]));
    said.textContent = found ? found[1] : "This box knows the usual answers only; lesson 0's own tests judge any other.";
  });

  // ---- the race ----
  const figure = document.querySelector(".kv-race");
  const button = figure.querySelector("button");
  const status = figure.querySelector("[role=status]");
  const first = { button: button.textContent, status: status.innerHTML };
  let running = 0;

  class Lane {
    constructor(lane, wanted) {
      const row = figure.querySelector(`[data-lesson="${lane.lesson}"]`);
      this.lane = lane;
      this.row = row;
      this.wanted = wanted;
      this.squares = [...row.querySelectorAll(".kv-lane__track i")];
      this.clock = row.querySelector("output");
      this.end = this.clock.textContent;
      this.before = this.squares.map((square) => square.style.getPropertyValue("--full") || 1);
      this.begin();
    }
    rest() {
      this.squares.forEach((square, i) => square.style.setProperty("--full", this.before[i]));
    }
    begin() {
      this.next = 0;
      this.at = 0; // thousandths of this lane's time
      this.got = this.wanted.map(() => 0);
      this.squares.forEach((square) => square.style.setProperty("--full", 0));
      this.row.classList.remove("done");
    }
    // Show everything that had come after so many seconds.
    go(seconds) {
      if (this.row.classList.contains("done")) return;
      const { came, seconds: all } = this.lane;
      const changed = new Set();
      while (this.next < came.length && this.at + came[this.next][0] <= (1000 * seconds) / all) {
        const [wait, request] = came[this.next++];
        this.at += wait;
        this.got[request]++;
        changed.add(request);
      }
      changed.forEach((i) => this.squares[i].style.setProperty("--full", this.got[i] / this.wanted[i]));
      this.clock.textContent = seconds.toFixed(1) + " s";
      if (seconds >= all) this.finish();
    }
    finish() {
      this.squares.forEach((square) => square.style.setProperty("--full", 1));
      this.clock.textContent = this.end;
      this.row.classList.add("done");
    }
  }

  function load() {
    return new Promise((done, failed) => {
      if (window.KV_RACE) return done(window.KV_RACE);
      const script = document.createElement("script");
      script.src = figure.dataset.race;
      script.addEventListener("load", () => done(window.KV_RACE));
      script.addEventListener("error", failed);
      document.head.append(script);
    });
  }

  function stop(lanes) {
    cancelAnimationFrame(running);
    running = 0;
    lanes.forEach((lane) => (lane.finish(), lane.rest()));
    figure.classList.remove("running");
    button.textContent = first.button;
    status.innerHTML = first.status;
  }

  async function race() {
    const { lanes: recorded, wanted } = await load();
    const lanes = recorded.map((lane) => new Lane(lane, wanted));
    const last = Math.max(...recorded.map((lane) => lane.seconds));
    const start = performance.now();
    figure.classList.add("running");
    button.textContent = "Stop";
    const step = function () {
      const seconds = ((performance.now() - start) / 1000) * (window.KV_RACE.pace || 1);
      lanes.forEach((lane) => lane.go(seconds));
      if (seconds < last) running = requestAnimationFrame(step);
      else stop(lanes);
    };
    running = requestAnimationFrame(step);
    stop.now = () => stop(lanes);
  }

  const begin = () => race().catch(() => (button.hidden = true));
  button.hidden = false;
  button.addEventListener("click", () => (running ? stop.now() : begin()));
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const seen = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect();
    setTimeout(() => running || begin(), 1500); // the picture at rest is read first
  }, { threshold: 0.6 });
  seen.observe(figure);
})();
