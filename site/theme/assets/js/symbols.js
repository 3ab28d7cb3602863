// Course machinery. The API's index: an address of when the API was one page, api/#kvpool.grow, leads to its name's page.
(function () {
  "use strict";
  function follow() {
    const anchor = decodeURIComponent(location.hash.slice(1));
    const link = document.getElementById(anchor.split(".")[0]);
    if (link && link.matches("a.kv-symbol")) location.replace(link.href.split("#")[0] + "#" + anchor);
  }
  window.addEventListener("hashchange", follow);
  follow();
})();
