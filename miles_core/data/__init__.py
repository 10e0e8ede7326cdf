"""From files and generators to tokenized prompts: rows -> tokenization -> dataset -> source."""
