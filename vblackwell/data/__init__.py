"""From files to rows of tokens: text, conversations, tokenizers, and the order of what is read."""
