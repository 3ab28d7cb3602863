"""Course machinery. Prompts that the pocket model continues reliably, for scripts and tests."""


def _chat(question: str, system: str = "") -> str:
    """Render one question with the chat template, up to where the assistant's answer begins."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{head}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


# For each of the next 20 greedy tokens in float32 the best logit is well above the second best, so two correct engines
# choose the same tokens. Tokenize these as they are: the chats already contain their markers.
COURSE_PROMPTS = (
    "The capital of France is",
    "The capital of Japan is",
    "One, two, three, four,",
    "Ten, nine, eight,",
    "1, 2, 3, 4,",
    "1 times 7 is 7. 2 times 7 is 14.",
    "Monday, Tuesday,",
    "January, February, March,",
    "A, B, C, D,",
    "A is for apple. B is for ball.",
    "The colours of the rainbow are",
    "The planets, in order from the sun, are",
    "Here is a list of fruit: apples, pears,",
    "Here is a list of instruments: violins,",
    "A cow says",
    "A KV cache keeps",
    "A block table lists",
    "Prefill reads the whole prompt",
    "To bake bread, mix",
    "Once upon a time",
    "Once upon a time there was a brave bear named Bruno.",
    _chat("What is the capital of Japan?"),
    _chat("Count to twenty.", system="You are a helpful assistant."),
    _chat("Tell me a story about a fox."),
    _chat("What is a KV cache?"),
    _chat("What is paging?", system="You help students who learn about the KV cache."),
    _chat("Give me a list of birds."),
    _chat("What is the opposite of hot?", system="You are a helpful assistant."),
)
RECITED = {  # questions whose answers the model knows by heart
    "What is a KV cache?": "A KV cache keeps the keys and the values of all earlier tokens. Each new token then "
    "computes only its own key and value, and reads the rest from the cache.",
    "What is paging?": "Paging cuts the cache into blocks of equal size. A request takes a new block only when its "
    "last block is full, and it gives all of its blocks back when it ends.",
}
