/* Additions to the theme for screen readers, keyboard users and paper. */
(function () {
  "use strict";
  function each(selector, act) {
    document.querySelectorAll(selector).forEach(act);
  }

  // Content wider than the page scrolls in its own box, which must be reachable by keyboard.
  function reach() {
    each(".md-typeset__scrollwrap, .md-typeset p:has(> img), .drawing-room, .kv-hero__commands, pre > code", function (box) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    });
  }

  function mend() {
    each(".md-code__nav:not([role])", function (nav) {
      nav.setAttribute("role", "none"); // a copy button, not navigation
    });
    reach();
  }

  // The theme adds buttons and boxes after this script has run: each is mended before it is painted.
  const THEIRS = ".md-code__nav, .md-typeset__scrollwrap";
  new MutationObserver(function (changes) {
    const isTheirs = (node) => node.nodeType === 1 && (node.matches(THEIRS) || node.querySelector(THEIRS));
    if (changes.some((change) => [...change.addedNodes].some(isTheirs))) mend();
  }).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
  mend();
  document.fonts.ready.then(reach);
  window.addEventListener("resize", reach);
  document.addEventListener("toggle", reach, true);

  // On paper nothing can be opened.
  let closed = [];
  window.addEventListener("beforeprint", function () {
    closed = [...document.querySelectorAll(".md-content details:not([open])")];
    closed.forEach((box) => (box.open = true));
  });
  window.addEventListener("afterprint", function () {
    closed.forEach((box) => (box.open = false));
  });
})();
