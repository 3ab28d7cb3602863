"""Lesson 16. Both ways to read latents in Python's loops, with numbers that count their multiplications."""


class Counted:
    """A number that counts how often numbers are multiplied."""

    count = 0

    def __init__(self, value):
        self.value = value

    def __mul__(self, other):
        Counted.count += 1
        return Counted(self.value * other.value)

    def __add__(self, other):
        return Counted(self.value + other.value)


def dot(a, b):
    total = Counted(0)
    for x, y in zip(a, b, strict=True):
        total = total + x * y
    return total


def times(matrix, vector):
    return [dot(row, vector) for row in matrix]


def weighted(weights, vectors):
    """Return the sum of vectors, each multiplied by its weight."""
    return times(list(zip(*vectors, strict=True)), weights)


def ones(*sizes):
    return [ones(*sizes[1:]) for _ in range(sizes[0])] if sizes else Counted(1)


def loops(config, q_len, kv_len):
    """Compute attention (no softmax, no mask) in both ways with Python's loops; return the multiplications of each."""
    nope, rope, v, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    counts = []
    for way in (loop_expanded, loop_absorbed):
        Counted.count = 0
        for _ in range(config.num_attention_heads):
            w_uk, w_uv = ones(nope, rank), ones(v, rank)
            way(ones(q_len, nope), ones(q_len, rope), ones(kv_len, rank), ones(kv_len, rope), w_uk, w_uv)
        counts.append(Counted.count)
    return tuple(counts)


def loop_expanded(q_nope, q_rope, c, r, w_uk, w_uv):
    keys = [times(w_uk, latent) + rotary for latent, rotary in zip(c, r, strict=True)]
    values = [times(w_uv, latent) for latent in c]
    return [weighted(times(keys, a + b), values) for a, b in zip(q_nope, q_rope, strict=True)]


def loop_absorbed(q_nope, q_rope, c, r, w_uk, w_uv):
    keys = [latent + rotary for latent, rotary in zip(c, r, strict=True)]
    absorbed = [weighted(a, w_uk) + b for a, b in zip(q_nope, q_rope, strict=True)]
    return [times(w_uv, weighted(times(keys, one), c)) for one in absorbed]
