"""Sites and the launcher: the only part that talks to a scheduler."""
