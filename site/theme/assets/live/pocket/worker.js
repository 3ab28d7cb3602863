// Course machinery. Runs the pocket model in a worker. Asked {id, kind, …}; answers {id, answer} or {id, error}; {got} counts bytes.
import { countFetches } from "../counted.js";
import { Model, readTensors } from "./model.js";
import { Tokenizer } from "./tokens.js";

const HERE = new URL("../vendor/pocket/", import.meta.url).href;
const get = (name) => fetch(HERE + name);
countFetches((got) => postMessage({ got }), (failed) => postMessage({ failed }));
const json = async (name) => (await get(name)).json();

let model;
let tokenizer;

const kinds = {
  async load({ slots }) {
    const [config, defaults, vocabulary, weights] = await Promise.all([json("config.json"), json("generation_config.json"), json("tokenizer.json"), get("model.safetensors")]);
    model = new Model(config, readTensors(await weights.arrayBuffer()), slots);
    tokenizer = new Tokenizer(vocabulary);
    return { ends: [defaults.eos_token_id].flat() };
  },
  encode: ({ text }) => tokenizer.encode(text),
  decode: ({ ids }) => tokenizer.decode(ids),
  // tokens: those from position `start` on; slots: of all tokens up to the last of them.
  step: ({ tokens, start, slots }) => model.next(tokens, start, slots),
};

onmessage = async ({ data: { id, kind, ...asked } }) => {
  try {
    postMessage({ id, answer: await kinds[kind](asked) });
  } catch (error) {
    postMessage({ id, error: String(error.message || error) });
  }
};
