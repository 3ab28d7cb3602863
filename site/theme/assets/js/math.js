// Course machinery. Typesets a page's formulas with KaTeX, which is fetched when a reader comes near the first of them.
//
// scripts/website/formulas.py has put their source aside; until they are typeset, and where no script runs, they are text.
(function () {
  "use strict";
  const FOLDER = document.currentScript.src.replace(/js\/math\.js.*$/, "vendor/katex/");
  const NEAR = "600px"; // so that it is done before a formula comes into sight
  const formulas = [...document.querySelectorAll(".arithmatex[data-tex]")];
  let asked = null;

  function fetched(tag, attrs) {
    return new Promise((done, failed) => {
      const node = Object.assign(document.createElement(tag), attrs);
      node.addEventListener("load", done);
      node.addEventListener("error", failed);
      document.head.append(node);
    });
  }

  function render(formula) {
    katex.render(formula.dataset.tex, formula, { displayMode: "display" in formula.dataset, throwOnError: false });
  }

  async function typeset() {
    const sheet = fetched("link", { rel: "stylesheet", href: FOLDER + "katex.min.css" });
    await Promise.all([sheet, fetched("script", { src: FOLDER + "katex.min.js" })]);
    formulas.forEach(render);
  }

  const start = () => (asked ||= typeset().catch(() => {})); // they stay text
  const near = new IntersectionObserver(
    (seen) => seen.some((one) => one.isIntersecting) && (near.disconnect(), start()),
    { rootMargin: NEAR },
  );
  formulas.forEach((formula) => near.observe(formula));
  window.addEventListener("beforeprint", start);
})();
