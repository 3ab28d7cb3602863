/* The index of the search is the heaviest file of a page. It is fetched when somebody goes near the search box. */
(function () {
  "use strict";
  var open = XMLHttpRequest.prototype.open;
  var send = XMLHttpRequest.prototype.send;
  var waiting = [];
  var wanted = false;

  XMLHttpRequest.prototype.open = function (method, url) {
    this.isSearchIndex = String(url).endsWith("search/search_index.json");
    return open.apply(this, arguments);
  };
  XMLHttpRequest.prototype.send = function () {
    var request = this;
    var given = arguments;
    if (wanted || !request.isSearchIndex) return send.apply(request, given);
    waiting.push(function () {
      send.apply(request, given);
    });
  };

  function go() {
    if (wanted) return;
    wanted = true;
    waiting.forEach(function (sendNow) {
      sendNow();
    });
  }
  function isSearch(element) {
    return element.closest && element.closest(".md-search, [for='__search']");
  }
  ["focusin", "pointerover", "touchstart"].forEach(function (name) {
    document.addEventListener(name, function (event) {
      if (isSearch(event.target)) go();
    }, { passive: true });
  });
  document.addEventListener("change", function (event) {
    if (event.target.id === "__search") go();
  });
})();
