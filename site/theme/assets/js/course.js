/* Additions to the theme for screen readers and keyboard users. */
(function () {
  "use strict";
  function each(selector, act) {
    document.querySelectorAll(selector).forEach(act);
  }

  // Content wider than the page scrolls in its own box, which must be reachable by keyboard.
  function reach() {
    each(".md-typeset__scrollwrap, .md-typeset p:has(> img), .kv-hero__commands, pre > code", function (box) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    });
  }

  function name() {
    each("[role='dialog']:not([aria-label])", function (dialog) {
      dialog.setAttribute("aria-label", "Search");
    });
    each(".md-code__nav", function (nav) {
      nav.setAttribute("role", "none"); // a copy button, not navigation
    });
    each("th:empty", function (corner) { // an empty corner cell is not a heading
      corner.replaceWith(document.createElement("td"));
    });
  }

  // A long name in a table may break after an underscore, a dot or a slash, and nowhere else.
  function breakNames() {
    each("td code", function (code) {
      if (code.childElementCount || code.textContent.length < 16) return;
      code.innerHTML = code.innerHTML.replace(/[_./,](?=[A-Za-z])/g, "$&<wbr>");
    });
  }

  window.addEventListener("load", function () {
    name();
    breakNames();
    reach();
    document.fonts.ready.then(reach);
  });
  window.addEventListener("resize", reach);
  document.addEventListener("toggle", reach, true);
})();
