// Course machinery. The pocket model's tokenizer in a page: byte-level BPE, read from the shipped tokenizer.json.
//
// Text is split into pieces as tokenizer.json says, each piece into bytes, and neighbours are merged, the pair that was
// learnt first before any other (Sennrich et al. 2016, arXiv:1508.07909). Lesson 6 says what the bytes are about.

// As in tokenizer.json, whose pattern is not JavaScript's: no (?i: ), and \s is Unicode's.
const S = "\\p{White_Space}";
const PIECE = new RegExp(
  `'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^${S}\\p{L}\\p{N}]+[\\r\\n]*|${S}*[\\r\\n]+|${S}+(?!\\P{White_Space})|${S}+`,
  "gu",
);

// The printable stand-in of each byte: printable bytes stand for themselves, the others from U+0100 on.
function standIns() {
  const isPlain = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let others = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPlain(byte) ? byte : others++));
}

export class Tokenizer {
  // file: the parsed tokenizer.json.
  constructor(file) {
    const { vocab, merges } = file.model;
    this.ids = new Map(Object.entries(vocab));
    this.ranks = new Map(merges.map((pair, rank) => [pair.join(" "), rank]));
    this.special = new Map(file.added_tokens.map(({ content, id }) => [content, id]));
    this.signs = standIns();
    const byteOf = new Map(this.signs.map((sign, byte) => [sign, byte]));
    this.bytes = [];
    for (const [token, id] of this.ids) this.bytes[id] = Uint8Array.from(token, (sign) => byteOf.get(sign));
    for (const [text, id] of this.special) this.bytes[id] = new TextEncoder().encode(text);
  }

  encode(text) {
    const found = [];
    const escaped = [...this.special.keys()].map((token) => token.replace(/[|]/g, "\\|"));
    for (const part of text.split(new RegExp(`(${escaped.join("|")})`))) {
      if (this.special.has(part)) found.push(this.special.get(part));
      else for (const [piece] of part.matchAll(PIECE)) found.push(...this.merged(piece));
    }
    return found;
  }

  merged(piece) {
    const parts = [...new TextEncoder().encode(piece)].map((byte) => this.signs[byte]);
    for (;;) {
      let [best, at] = [Infinity, -1];
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return parts.map((part) => this.ids.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  // The text of some tokens; bytes that form no character become U+FFFD.
  decode(ids) {
    const bytes = ids.flatMap((id) => [...this.bytes[id]]);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
  }
}
