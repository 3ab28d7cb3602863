"""Course machinery. Text: tokens of a text and text of tokens, chats, prompts."""
