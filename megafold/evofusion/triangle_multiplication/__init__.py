"""Triangle multiplication, outgoing and incoming (AF3 algorithms 12 and 13)."""
