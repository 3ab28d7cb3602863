// Course machinery. A page's Python without a page, for tests: the worker's Pyodide in Node, one question a line.
//
// `node scripts/live/node.mjs site/theme/assets/live` reads {kind, question} from stdin, a line each, and answers
// {answer} or {error}, a line each. The worker's own START is what it runs.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const live = resolve(process.argv[2]);
const vendor = `${live}/vendor/`;
const archive = (name) => new Uint8Array(readFileSync(vendor + name));
const START = /const START = `(.*?)`;/s.exec(readFileSync(`${live}/worker.js`, "utf8"))[1];

const { loadPyodide } = await import(pathToFileURL(`${vendor}pyodide.mjs`));
const python = await loadPyodide({ indexURL: vendor });
for (const name of ["course.zip", "tests.zip"]) python.unpackArchive(archive(name), "zip", { extractDir: "/course" });
python.unpackArchive(archive("tools.zip"), "zip", { extractDir: "/tools" });
python.runPython('import sys; sys.path.insert(1, "/tools")');
const answer = await python.runPythonAsync(START);

for await (const line of createInterface({ input: process.stdin })) {
  const { kind, question } = JSON.parse(line);
  let said;
  try {
    said = { answer: JSON.parse(answer("/course", kind, JSON.stringify(question), () => {})) };
  } catch (error) {
    said = { error: String(error.message || error).trim() };
  }
  process.stdout.write(JSON.stringify(said) + "\n");
}
