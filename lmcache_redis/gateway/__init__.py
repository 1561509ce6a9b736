"""The `lm://` server: LMCache's TCP protocol on top of the tiers."""
