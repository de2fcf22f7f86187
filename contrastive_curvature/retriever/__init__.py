"""May I act on this hit? Answers of a search, each at a stated rate of errors."""
