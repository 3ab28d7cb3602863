/* What the theme's own pages lack for a reader who listens, or who has no mouse. */
(function () {
  "use strict";
  function each(selector, act) {
    document.querySelectorAll(selector).forEach(act);
  }

  // What is wider than the page scrolls in a box of its own; the keyboard has to reach that box.
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
      nav.setAttribute("role", "none"); // a copy button, not a place to go to
    });
    each("th:empty", function (corner) { // the corner over a table's first column is no heading
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
