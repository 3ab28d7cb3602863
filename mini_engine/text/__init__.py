"""Course machinery. Text: tokenizing, detokenizing, chats and prompts."""
