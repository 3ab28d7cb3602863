// Course machinery. The pocket model's forward pass in a page: mini_engine/model/qwen3.py over lesson 2's pool, with Float32Array.
//
// K and V of a token lie in the slot that the repository's allocator gave it; attention reads them by their slots.

// The tensors of a safetensors file as float32. A bfloat16 number is the upper half of the float32 with the same value.
export function readTensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = {};
  for (const [name, { dtype, data_offsets: range }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    if (dtype !== "BF16") throw new Error(`${name} is ${dtype}; this page reads BF16`);
    const [from, to] = range;
    const halves = new Uint16Array(buffer.slice(8 + length + from, 8 + length + to));
    tensors[name] = new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);
  }
  return tensors;
}

// out = weight · x, for a weight [out.length, x.length]. Four sums, so that the processor need not wait for one.
function multiply(weight, x, out) {
  const size = x.length;
  for (let row = 0, at = 0; row < out.length; row++, at += size) {
    let [a, b, c, d] = [0, 0, 0, 0];
    for (let i = 0; i < size; i += 4) {
      a += weight[at + i] * x[i];
      b += weight[at + i + 1] * x[i + 1];
      c += weight[at + i + 2] * x[i + 2];
      d += weight[at + i + 3] * x[i + 3];
    }
    out[row] = a + b + (c + d);
  }
  return out;
}

// RMSNorm of `size` numbers from `at` on.
function normalize(x, weight, eps, out, at = 0, size = weight.length) {
  let sum = 0;
  for (let i = 0; i < size; i++) sum += x[at + i] * x[at + i];
  const scale = 1 / Math.sqrt(sum / size + eps);
  for (let i = 0; i < size; i++) out[at + i] = weight[i] * Math.fround(x[at + i] * scale);
  return out;
}

export class Model {
  // config: the checkpoint's config.json. numSlots: the size of the pool.
  constructor(config, tensors, numSlots) {
    const { num_attention_heads: heads, num_key_value_heads: kvHeads, head_dim: dim, hidden_size: hidden } = config;
    Object.assign(this, { config, tensors, heads, kvHeads, dim, hidden, eps: config.rms_norm_eps });
    const pool = () => Array.from({ length: config.num_hidden_layers }, () => new Float32Array(numSlots * kvHeads * dim));
    [this.K, this.V] = [pool(), pool()];
    const theta = config.rope_parameters.rope_theta;
    this.turns = Float32Array.from({ length: dim / 2 }, (_, i) => 1 / Math.fround(theta ** Math.fround((2 * i) / dim)));
    this.q = new Float32Array(heads * dim);
    this.out = new Float32Array(heads * dim);
    this.k = new Float32Array(kvHeads * dim);
    this.v = new Float32Array(kvHeads * dim);
    this.normed = new Float32Array(hidden);
    this.added = new Float32Array(hidden);
    this.gate = new Float32Array(config.intermediate_size);
    this.up = new Float32Array(config.intermediate_size);
    this.logits = new Float32Array(config.vocab_size);
  }

  // Feed the token at `position` of a text; slots: of its tokens 0 … position. Returns the hidden state.
  feed(token, position, slots) {
    const embedding = this.tensors["model.embed_tokens.weight"];
    const x = embedding.slice(token * this.hidden, (token + 1) * this.hidden);
    const angles = this.turns.map((turn) => position * turn);
    for (let layer = 0; layer < this.config.num_hidden_layers; layer++) {
      const weight = (name) => this.tensors[`model.layers.${layer}.${name}.weight`];
      this.attention(layer, weight, x, angles, position, slots);
      this.feedForward(weight, x);
    }
    return x;
  }

  attention(layer, weight, x, angles, position, slots) {
    const { q, k, v, out, normed, added, dim, eps } = this;
    normalize(x, weight("input_layernorm"), eps, normed);
    multiply(weight("self_attn.q_proj"), normed, q);
    multiply(weight("self_attn.k_proj"), normed, k);
    multiply(weight("self_attn.v_proj"), normed, v);
    for (const [heads, norm] of [[q, "self_attn.q_norm"], [k, "self_attn.k_norm"]]) {
      for (let at = 0; at < heads.length; at += dim) {
        normalize(heads, weight(norm), eps, heads, at);
        this.rotate(heads, at, angles);
      }
    }
    this.K[layer].set(k, slots[position] * k.length);
    this.V[layer].set(v, slots[position] * v.length);
    for (let head = 0; head < this.heads; head++) this.attend(layer, head, position, slots);
    multiply(weight("self_attn.o_proj"), out, added);
    for (let i = 0; i < x.length; i++) x[i] += added[i];
  }

  // Rotate the pairs (i, i + D/2) of one head by the token's angles.
  rotate(head, at, angles) {
    const half = this.dim / 2;
    for (let i = 0; i < half; i++) {
      const [cos, sin, a, b] = [Math.cos(angles[i]), Math.sin(angles[i]), head[at + i], head[at + half + i]];
      head[at + i] = a * cos - b * sin;
      head[at + half + i] = b * cos + a * sin;
    }
  }

  // One query head over the keys and values of its group, gathered by slot.
  attend(layer, head, position, slots) {
    const { q, out, dim, K, V } = this;
    const row = this.k.length;
    const shared = Math.floor((head * this.kvHeads) / this.heads) * dim;
    const from = head * dim;
    const weights = new Float32Array(position + 1);
    let [largest, sum] = [-Infinity, 0];
    for (let t = 0; t <= position; t++) {
      const at = slots[t] * row + shared;
      let score = 0;
      for (let i = 0; i < dim; i++) score += q[from + i] * K[layer][at + i];
      weights[t] = score / Math.sqrt(dim);
      largest = Math.max(largest, weights[t]);
    }
    for (let t = 0; t <= position; t++) sum += weights[t] = Math.exp(weights[t] - largest);
    out.fill(0, from, from + dim);
    for (let t = 0; t <= position; t++) {
      const at = slots[t] * row + shared;
      for (let i = 0; i < dim; i++) out[from + i] += (weights[t] / sum) * V[layer][at + i];
    }
  }

  feedForward(weight, x) {
    const { normed, gate, up, added } = this;
    normalize(x, weight("post_attention_layernorm"), this.eps, normed);
    multiply(weight("mlp.gate_proj"), normed, gate);
    multiply(weight("mlp.up_proj"), normed, up);
    for (let i = 0; i < gate.length; i++) gate[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
    multiply(weight("mlp.down_proj"), gate, added);
    for (let i = 0; i < x.length; i++) x[i] += added[i];
  }

  // Feed tokens start, start + 1, … of a text. Returns the most likely next token.
  next(tokens, start, slots) {
    let hidden;
    tokens.forEach((token, i) => (hidden = this.feed(token, start + i, slots)));
    normalize(hidden, this.tensors["model.norm.weight"], this.eps, this.normed);
    multiply(this.tensors["model.embed_tokens.weight"], this.normed, this.logits); // the head is the embedding matrix
    return this.logits.reduce((best, logit, id) => (logit > this.logits[best] ? id : best), 0);
  }
}
