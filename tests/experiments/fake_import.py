"""What a fake contender preloads: it notes a variable of the environment as a library reads its settings, once."""

import os

SETTING = os.environ.get("FAKE_SETTING")
