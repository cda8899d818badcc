"""The house rules that no linter knows: what documents promise is there, and what layers forbid is refused."""
