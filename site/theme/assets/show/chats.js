/* Course machinery. Plays the tree of chats, once when it comes into view and whenever asked; complete without it. */
(function () {
  "use strict";
  const STEP = 150; // milliseconds for a block; a chat's arrival and its sum stay longer
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  function setUp(figure) {
    const steps = JSON.parse(figure.dataset.steps);
    const shapes = [...figure.querySelectorAll("[data-at]")];
    const [sum, all, share] = figure.querySelectorAll(".kv-chats__sum :is(b, span)");
    const bar = figure.querySelector(".kv-chats__sum i");
    const say = figure.querySelector(".kv-chats__say");
    const play = figure.querySelector("[data-play]");
    const first = say.textContent;
    let timer = 0;

    // Show what had happened after so many steps.
    function go(step) {
      const [found, tokens, words] = steps[step];
      for (const shape of shapes) {
        const at = Number(shape.dataset.at);
        shape.classList.toggle("later", at > step);
        shape.classList.toggle("now", at === step && shape.tagName !== "g");
      }
      sum.textContent = found;
      all.textContent = tokens;
      const part = tokens ? found / tokens : 0;
      share.textContent = Math.round(100 * part) + " %";
      bar.style.setProperty("--part", part);
      say.textContent = words;
    }

    function end() {
      clearTimeout(timer);
      timer = 0;
      go(steps.length - 1);
      shapes.forEach((shape) => shape.classList.remove("now"));
      say.textContent = first;
      if (play) play.textContent = "Play again";
    }

    function run(step = 0) {
      if (step >= steps.length) return end();
      go(step);
      if (play) play.textContent = "Stop";
      const rests = step + 1 < steps.length && steps[step][2] !== steps[step + 1][2];
      timer = setTimeout(() => run(step + 1), rests ? 6 * STEP : STEP);
    }

    figure.show = go; // for the film: scripts/website/film.py
    if (play) {
      play.hidden = false;
      play.addEventListener("click", () => (timer ? end() : run()));
    }
    const embed = figure.querySelector("[data-embed]");
    if (embed && navigator.clipboard) {
      const words = embed.textContent;
      embed.hidden = false;
      embed.addEventListener("click", async () => {
        await navigator.clipboard.writeText(embed.dataset.embed);
        embed.textContent = "Copied";
        setTimeout(() => (embed.textContent = words), 2000);
      });
    }
    if (still.matches || location.hash === "#still") return;
    const seen = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting) return;
      seen.disconnect();
      if (!timer) run();
    }, { threshold: 0.6 });
    seen.observe(figure);
  }

  document.querySelectorAll(".kv-chats").forEach(setUp);
})();
