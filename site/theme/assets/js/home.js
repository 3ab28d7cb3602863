/* The front page: the race in recorded time, and a command to copy. Both are complete without this script. */
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
      this.begin();
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
    lanes.forEach((lane) => lane.finish());
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

  button.hidden = false;
  button.addEventListener("click", () => (running ? stop.now() : race().catch(() => (button.hidden = true))));
})();
