// Course machinery. Runs the course's own Python in a worker: Pyodide, from this site and no other.
//
// Asked {id, kind, question}; answers {id, answer} or {id, error, fatal}, and {id, alive} while it works; {got} counts the
// bytes of a download. The page ends a worker that gives no sign of life, and starts another.
import { countFetches } from "./counted.js";
import { loadPyodide } from "./vendor/pyodide.mjs";

const HERE = new URL("./vendor/", import.meta.url).href;
const load = async (name) => (await fetch(HERE + name)).arrayBuffer();
countFetches((got) => postMessage({ got }), (failed) => postMessage({ failed }));

const START = `
import sys
sys.path.insert(0, "/course")
from scripts.live import deadline, without_torch
without_torch.install()
sys.modules["course_deadline"] = deadline
from scripts.live.page import answer
answer
`;
let tools; // pytest, hypothesis and the lessons' tests, only when a check is asked for
let answer;
let python;

async function start() {
  const [ready, course] = await Promise.all([loadPyodide({ indexURL: HERE }), load("course.zip")]);
  python = ready;
  python.unpackArchive(course, "zip", { extractDir: "/course" });
  answer = await python.runPythonAsync(START);
  postMessage({ ready: true });
}

async function unpackTools() {
  const [packages, tests] = await Promise.all([load("tools.zip"), load("tests.zip")]);
  python.unpackArchive(packages, "zip", { extractDir: "/tools" });
  python.unpackArchive(tests, "zip", { extractDir: "/course" });
  python.runPython('import sys; sys.path.insert(1, "/tools")');
  postMessage({ landed: true });
  answer("/course", "prepare", "{}", () => {}); // imports what takes seconds, before the clock of a check starts
}

const started = start().catch((error) => postMessage({ failed: String(error) }));

onmessage = async ({ data: { id, kind, question } }) => {
  await started;
  try {
    if (kind === "check" || kind === "prepare") await (tools ||= unpackTools());
    postMessage({ id, alive: "start" });
    postMessage({ id, answer: answer("/course", kind, question, (text) => postMessage({ id, alive: text })) });
  } catch (error) {
    postMessage({ id, error: String(error.message || error), fatal: error.name !== "PythonError" });
  }
};
