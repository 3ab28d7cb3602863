/* Search is the heaviest part of a page: its index and its worker. Both wait until the reader approaches the search box
   or presses a key that opens it: Zensical's box is outside the page's header and takes the focus without an event there.
   The theme requests them at once through XMLHttpRequest and Worker; if it used another API, nothing would be delayed. */
(function () {
  "use strict";
  const later = [];
  let wanted = false;
  const whenWanted = (act) => (wanted ? act() : later.push(act));

  const { open, send } = XMLHttpRequest.prototype;
  XMLHttpRequest.prototype.open = function (method, url) {
    this.isSearchIndex = /\/search(_index)?\.json$/.test(url); // Zensical's is search.json
    return open.apply(this, arguments);
  };
  XMLHttpRequest.prototype.send = function () {
    if (this.isSearchIndex) whenWanted(() => send.apply(this, arguments));
    else send.apply(this, arguments);
  };

  const NativeWorker = window.Worker;
  class LateWorker extends EventTarget {
    constructor(url) {
      super();
      whenWanted(() => {
        if (this.isEnded) return;
        this.worker = new NativeWorker(url);
        for (const name of ["message", "error", "messageerror"]) { // mkdocs-material adds listeners, Zensical sets properties
          this.worker.addEventListener(name, (event) => {
            const copy = new event.constructor(name, event);
            if (this["on" + name]) this["on" + name](copy);
            this.dispatchEvent(copy);
          });
        }
      });
    }
    terminate() {
      this.isEnded = true;
      if (this.worker) this.worker.terminate();
    }
    postMessage(message) {
      whenWanted(() => this.isEnded || this.worker.postMessage(message));
    }
  }
  if (location.protocol !== "file:") { // there the worker is another, from iframe-worker
    window.Worker = function (url, options) {
      return /\/workers\/search\./.test(url) ? new LateWorker(url) : new NativeWorker(url, options);
    };
  }

  function go() {
    wanted = true;
    later.splice(0).forEach((act) => act());
  }
  const isSearch = (element) => element.closest && element.closest(".md-search, [for='__search']");
  for (const name of ["focusin", "pointerover", "touchstart"]) {
    document.addEventListener(name, (event) => isSearch(event.target) && go(), { passive: true });
  }
  const OPENS = ["/", "s", "f", "k"]; // k with Ctrl or ⌘
  document.addEventListener("keydown", (event) => OPENS.includes(event.key) && go(), { capture: true });
  document.addEventListener("change", (event) => event.target.id === "__search" && go());
})();
