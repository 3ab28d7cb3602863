// Course machinery. Counts the bytes that a worker fetches, and tells at once when a fetch fails: Pyodide itself would
// wait forever for a file that never arrives.

// tell: called with the number of bytes so far. failed: called with a sentence.
export function countFetches(tell, failed) {
  const fetchIt = self.fetch.bind(self);
  let bytes = 0;

  async function count(name, reply) {
    const reader = reply.clone().body.getReader(); // the reply itself stays as it is: browsers cache compiled code by it
    try {
      for (let part = await reader.read(); !part.done; part = await reader.read()) tell((bytes += part.value.length));
    } catch {
      failed(`the download of ${name} broke off`);
    }
  }

  self.fetch = async (asked, ...more) => {
    const name = String(asked.url || asked).split("/").pop();
    const reply = await fetchIt(asked, ...more).catch((error) => {
      failed(`${name} did not arrive`);
      throw error;
    });
    if (reply.ok) count(name, reply);
    else failed(`the server answers ${reply.status} for ${name}`);
    return reply;
  };
}
