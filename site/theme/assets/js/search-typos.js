/* Search forgives one wrong letter. A word that is found nowhere ("evicton") is looked for again with one letter added,
   missing, changed or swapped, which the theme's index can do but is never asked to. A query that finds all its words is
   left alone. Loads after search-later.js, and wraps whatever stands for the search's worker by then. */
(function () {
  "use strict";
  const QUERY = 2, RESULT = 3; // the theme's names for what its worker is sent and what it answers
  const WORD = /^\p{L}{4,}$/u; // in a shorter word one letter is too much
  const SYNTAX = /["~^*+:]/; // a reader who writes these knows what to look for

  /** Return the query with each word that no result has marked as inexact. */
  function corrected(query, documents) {
    if (SYNTAX.test(query)) return query;
    const isMissing = (word) => {
      const found = documents.map((each) => each.terms[word.toLowerCase()]);
      return !found.includes(true) && (!found.length || found.includes(false)); // neither, for words such as "with"
    };
    return query.split(/([\s-]+)/).map((word) => (WORD.test(word) && isMissing(word) ? word + "~1" : word)).join("");
  }

  /** Let a worker ask a second time before the theme hears of an answer. */
  function forgiving(worker) {
    const { postMessage } = worker;
    const asked = []; // and not yet answered: answers come in the order of the queries
    worker.postMessage = function (message) {
      if (message.type === QUERY) asked.push({ query: message.data });
      return postMessage.apply(worker, arguments);
    };
    worker.addEventListener("message", (event) => { // the first listener: it can keep an answer from the theme's
      if (!event.data || event.data.type !== RESULT || !event.data.data.items) return;
      const documents = event.data.data.items.flat();
      const { query, isSecond } = asked.shift();
      const again = isSecond ? query : corrected(query, documents);
      if (isSecond) pardon(query, documents);
      if (again === query) return;
      event.stopImmediatePropagation();
      if (asked.length) return; // the reader has typed on
      asked.push({ query: again, isSecond: true });
      postMessage.call(worker, { type: QUERY, data: again });
    });
    return worker;
  }

  /** What was found under another spelling is not missing. */
  function pardon(query, documents) {
    const inexact = query.toLowerCase().split(/[\s-]+/).filter((word) => word.endsWith("~1"));
    for (const { terms } of documents) for (const word of inexact) delete terms[word.slice(0, -2)];
  }

  const Before = window.Worker;
  window.Worker = function (url, options) {
    const worker = new Before(url, options);
    return /\/workers\/search\./.test(url) ? forgiving(worker) : worker;
  };
})();
